"""Gradients of the compiled kernels on a GPU against fp64: at most twice the error of PyTorch's own backward."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.utils import counters

from dash_inductor.errors import ArgumentError
from dash_inductor.model import Band

from ..support.accuracy import check
from ..support.attention import Attention, compiled_backward
from ..support.calls import forward_spec

pytestmark = pytest.mark.gpu

MASKS = [Band(), Band(0), Band(0, None, "bottom_right"), Band(0, 99), Band(-40, 40)]
LENGTHS = [
    (1, 1),
    (17, 17),
    (113, 113),
    (128, 128),
    (255, 255),
    (1023, 1023),
    (4096, 4096),
    (113, 1023),
    (1023, 113),
    (1, 255),
]
GROUPS = itertools.cycle((1, 4, 8))
GRID = [(head_dim, mask, next(GROUPS)) for head_dim in (32, 64, 80, 128) for mask in MASKS]


def arch() -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def run_lengths(
    head_dim: int, mask: Band, group: int, dtype: torch.dtype, schedule: str | None, lengths: list[tuple[int, int]]
) -> None:
    some = Attention.random(64, 64, head_dim, mask, group=group, dtype=dtype)
    backward = compiled_backward(mask, some.scale, some.plan(arch(), schedule), dynamic=True)
    for q_len, kv_len in lengths:
        big = q_len * kv_len > 1 << 20
        p = Attention.random(q_len, kv_len, head_dim, mask, batch=1 if big else 2, kv_heads=2, group=group, dtype=dtype)
        for t in (p.q, p.k):
            torch._dynamo.maybe_mark_dynamic(t, 0)
        check(p, backward(p.do, p.q, p.k, p.v, *p.rounded_forward()))


@pytest.mark.parametrize(("head_dim", "mask", "group"), GRID, ids=str)
def test_bfloat16(head_dim: int, mask: Band, group: int) -> None:
    run_lengths(head_dim, mask, group, torch.bfloat16, None, LENGTHS)


@pytest.mark.parametrize(
    ("head_dim", "mask", "group"), [(8, Band(0), 1), (72, Band(), 2), (128, Band(0, 99), 4)], ids=str
)
def test_float16(head_dim: int, mask: Band, group: int) -> None:
    run_lengths(head_dim, mask, group, torch.float16, None, LENGTHS)


@pytest.mark.parametrize(
    ("head_dim", "mask", "group"), [(64, Band(0), 1), (128, Band(), 4), (40, Band(-40, 40), 1)], ids=str
)
def test_float32(head_dim: int, mask: Band, group: int) -> None:
    run_lengths(head_dim, mask, group, torch.float32, None, [(113, 113), (1023, 1023), (113, 1023), (1023, 113)])


ORDERED = [
    ("ascending", Band()),
    ("descending", Band(0)),
    ("spt", Band(0)),
    ("spt", Band(0, 99)),
    ("bent_fold", Band(0, None, "bottom_right")),
]


@pytest.mark.parametrize(("schedule", "mask"), ORDERED, ids=str)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 4), (128, 1)])
def test_ordered_single_pass(schedule: str, mask: Band, head_dim: int, group: int) -> None:
    run_lengths(head_dim, mask, group, torch.bfloat16, schedule, LENGTHS[1:])


@pytest.mark.parametrize(("schedule", "mask"), [("shift", Band()), ("symmetric_shift", Band(0))], ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1024, 1024), (1000, 1300), (513, 300)])
def test_cooperative_schedules(schedule: str, mask: Band, q_len: int, kv_len: int) -> None:
    """They wait both ways: launched cooperatively, all CTAs resident."""
    p = Attention.random(q_len, kv_len, 64, mask, group=2)
    backward = compiled_backward(mask, p.scale, p.plan(arch(), schedule))
    check(p, backward(p.do, p.q, p.k, p.v, *p.rounded_forward()))


def test_a_cooperative_grid_that_does_not_fit_is_an_error_not_a_hang() -> None:
    p = Attention.random(4096, 4096, 64, Band(), batch=8, kv_heads=8)
    backward = compiled_backward(p.mask, p.scale, p.plan(arch(), "shift"))
    out, lse = torch.empty_like(p.q), torch.empty(p.q.shape[:3], device="cuda")
    with pytest.raises((RuntimeError, ArgumentError), match=r"(?i)cooperative|co-residency"):
        backward(p.do, p.q, p.k, p.v, out, lse)  # the launch itself fails; the Hopper kernel's host side counts first


@pytest.mark.parametrize("schedule", [None, "spt"])
def test_one_kernel_for_all_lengths(schedule: str | None) -> None:
    some = Attention.random(64, 64, 64, Band(0))
    backward = compiled_backward(some.mask, some.scale, some.plan(arch(), schedule), dynamic=True)
    counters.clear()
    for length in (300, 17, 1023, 128):
        p = Attention.random(length, length, 64, Band(0))
        check(p, backward(p.do, p.q, p.k, p.v, *p.rounded_forward()))
    assert counters["stats"]["unique_graphs"] == 1


def test_offsets_beyond_32_bits() -> None:
    """2**31 elements of q: the end of a windowed sequence has the bits of the same tokens alone."""
    if torch.cuda.get_device_properties(0).total_memory < 70 << 30:
        pytest.skip("needs 70 GiB of GPU memory")
    length, tail, mask = 1 << 20, 4096, Band(0, 127)
    q, k, v, do = (
        torch.randn(1, length, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for heads in (16, 2, 2, 16)
    )
    plan = Attention(q[:, :, -tail:], k[:, :, -tail:], v[:, :, -tail:], do[:, :, -tail:], mask, 0.1).plan(arch())
    out, lse = torch.ops.dash_inductor.attention_forward(q, k, v, [], str(forward_spec(mask, 0.1)), str(plan), "test")
    backward = compiled_backward(mask, 0.1, plan)
    whole = backward(do, q, k, v, out, lse)
    alone = backward(*(t[:, :, -tail:] for t in (do, q, k, v, out, lse)))
    for a, b in zip(whole, alone, strict=True):
        assert torch.equal(a[:, :, -tail + 128 :], b[:, :, 128:])  # the first rows of the tail see keys before it


def test_strides_of_fused_and_expanded_inputs() -> None:
    """Views into one fused tensor, and a gradient that is an expanded scalar, as `loss = out.sum()` makes it."""
    qkv = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    do = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(q.shape)
    p = Attention(q, k, v, do, Band(0), 0.125)
    backward = compiled_backward(p.mask, p.scale, p.plan(arch()))
    check(p, backward(do, q, k, v, *p.rounded_forward()))
