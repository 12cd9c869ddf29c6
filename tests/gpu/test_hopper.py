"""Gradients of the Hopper kernel against fp64: head dims, masks, lengths, groups, schedules, layouts."""

from __future__ import annotations

import itertools

import pytest
import torch

from dash_inductor.errors import ArgumentError
from dash_inductor.model import Band, Plan
from dash_inductor.schedule.schedules import NAMES, define, supports

from ..support import hopper_calls
from ..support.accuracy import check
from ..support.attention import Attention, compiled_backward
from ..support.calls import backward_spec
from ..support.hopper import MARKS, Direct, plan_of
from ..support.hopper_builds import TILES
from ..support.repeats import poison

pytestmark = MARKS

DIMS = list(TILES)
MASKS = [
    Band(),
    Band(0),
    Band(0, None, "bottom_right"),
    Band(0, 99),
    Band(0, 99, "bottom_right"),
    Band(-40, 40),
    Band(None, 5),
]
LENGTHS = [(1, 1), (17, 17), (128, 128), (255, 255), (1024, 1024), (113, 1023), (1023, 113), (1, 255), (255, 1)]
SCHEDULES = [name for name in NAMES if name != "two_pass"]
LAUNCH_ORDERED = [name for name in SCHEDULES if define(name, Band()).resident is None]

_groups = itertools.cycle((1, 4, 8, 16, 2))
_dtypes = itertools.cycle((torch.bfloat16, torch.bfloat16, torch.float16))
_names = itertools.cycle([name for name in LAUNCH_ORDERED if all(supports(name, mask) is None for mask in MASKS)])
# full and causal at every head dim, every other mask at every second one
GRID = [
    (dims, mask, next(_groups), next(_dtypes), next(_names))
    for d, dims in enumerate(DIMS)
    for m, mask in enumerate(MASKS)
    if m < 2 or (d + m) % 2 == 0
]


def problem(
    dims: tuple[int, int], mask: Band, q_len: int, kv_len: int, *, batch: int = 2, kv_heads: int = 2, group: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Attention:  # fmt: skip
    return Attention.random(
        q_len, kv_len, dims[0], mask, batch=batch, kv_heads=kv_heads, group=group, dtype=dtype, value_dim=dims[1]
    )


@pytest.mark.parametrize(("dims", "mask", "group", "dtype", "name"), GRID, ids=str)
def test_lengths(dims: tuple[int, int], mask: Band, group: int, dtype: torch.dtype, name: str) -> None:
    kv_heads = 1 if group == 16 else 2  # multi-query attention is a group of all heads
    for q_len, kv_len in LENGTHS:
        p = problem(dims, mask, q_len, kv_len, batch=1, kv_heads=kv_heads, group=group, dtype=dtype)
        run = Direct(p, name)
        poison()
        check(p, run())


@pytest.mark.parametrize("mask", [Band(), Band(0), Band(0, 99), Band(-40, 40)], ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str, mask: Band) -> None:
    """All schedules on all masks they support, on grids small enough for those that need co-residency."""
    if supports(name, mask) is not None:
        with pytest.raises(ArgumentError, match=name):
            define(name, mask)
        return
    for q_len, kv_len, group in ((1024, 1024, 1), (1000, 1300, 2), (513, 300, 4)):
        p = problem((128, 128), mask, q_len, kv_len, batch=2, group=group)
        check(p, Direct(p, name)())


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n not in LAUNCH_ORDERED])
def test_co_resident_schedules_at_head_dim_64(name: str) -> None:
    for q_len, kv_len in ((1024, 1024), (1000, 1300), (100, 900), (1, 1)):
        mask = Band() if name == "shift" else Band(0)
        p = problem((64, 64), mask, q_len, kv_len, group=2)
        check(p, Direct(p, name)())


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_tiles_that_nobody_sees(dims: tuple[int, int]) -> None:
    """Whole tiles of queries without keys, and of keys without queries: their gradients are written as zeros."""
    for mask, q_len, kv_len in (
        (Band(300, 500), 1000, 1000),
        (Band(0), 300, 900),
        (Band(0, None, "bottom_right"), 900, 300),
    ):
        p = problem(dims, mask, q_len, kv_len)
        run = Direct(p, "spt")
        poison()
        gradients = run()
        check(p, gradients)
        unseen = ~p.keep().any(0)
        assert all((g[:, :, unseen] == 0).all() for g in gradients[1:])


def spread(t: torch.Tensor, extra: int) -> torch.Tensor:
    """The same values in rows that are `extra` elements further apart."""
    wide = torch.empty(*t.shape[:3], t.shape[3] + extra, dtype=t.dtype, device=t.device)
    wide[..., : t.shape[3]] = t
    return wide[..., : t.shape[3]]


def shifted(t: torch.Tensor) -> torch.Tensor:
    """The same values, starting 2 bytes past an aligned address."""
    memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:]
    return memory.view(t.shape).copy_(t)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_layouts_give_the_same_bits(dims: tuple[int, int]) -> None:
    """Any strides: read in place where TMA can, copied where it cannot (rows not 16-byte aligned, strided columns)."""
    p = problem(dims, Band(0), 300, 300)
    run = Direct(p, "spt")
    expected = run()
    check(p, expected)
    names = ("q", "k", "v", "do")
    layouts = {
        "contiguous": torch.Tensor.contiguous,
        "in place: rows apart": lambda t: spread(t, 8),
        "copied: rows not aligned": lambda t: spread(t, 3),
        "copied: start not aligned": shifted,
        "copied: columns strided": lambda t: t.mT.contiguous().mT,
    }
    for layout, change in layouts.items():
        got = run.with_problem(**{name: change(getattr(p, name)) for name in names})
        assert all(map(torch.equal, expected, got)), layout
    out, lse = run.forward
    got = run.on(p.do, p.q, p.k, p.v, spread(out, 3), lse.mT.contiguous().mT)
    assert all(map(torch.equal, expected, got)), "out and log-sum-exp"


def test_fused_and_expanded_inputs() -> None:
    """Views into one fused tensor; a gradient that is an expanded scalar; a batch that is one element repeated."""
    qkv = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    do = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(q.shape)
    p = Attention(q, k, v, do, Band(0), 0.125)
    check(p, Direct(p, "spt")())
    repeated = [t[:1].expand(2, -1, -1, -1) for t in (q, k, v)]
    p = Attention(*repeated, v, Band(0), 0.125)
    check(p, Direct(p, "spt")())


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
def test_output_layouts(order: tuple[int, ...]) -> None:
    p = problem((128, 128), Band(), 300, 200, group=2)
    expected = Direct(p, "ascending")()
    got = Direct(p, "ascending", orders=(order,) * 3)()
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)
        assert b.permute(order).is_contiguous()


@pytest.mark.parametrize("name", ["ascending", "spt", "bent_fold"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_compiled_calls_the_same_kernel(dims: tuple[int, int], name: str) -> None:
    """Through Inductor, with static and with dynamic lengths."""
    mask = Band() if name == "ascending" else Band(0)
    p = problem(dims, mask, 300, 300, group=2)
    run = Direct(p, name)
    tensors = p.do, p.q, p.k, p.v, *run.forward
    for dynamic in (False, True):
        compiled = compiled_backward(mask, p.scale, run.plan, dynamic=dynamic)
        assert all(map(torch.equal, run(), compiled(*tensors)))


def test_plans_of_other_kernels_are_refused() -> None:
    p = problem((64, 64), Band(), 64, 64)
    other = Plan("portable", "spt", "keep", plan_of(p, "spt").dkdv)
    with pytest.raises(ArgumentError, match="hopper"):
        hopper_calls.backward(p.do, p.q, p.k, p.v, *p.rounded_forward(), backward_spec(Band(), 0.125), other)


def test_offsets_beyond_32_bits() -> None:
    """2**31 elements of q: the end of a windowed sequence has the bits of the same tokens alone."""
    if torch.cuda.get_device_properties(0).total_memory < 70 << 30:
        pytest.skip("needs 70 GiB of GPU memory")
    length, tail, mask = 1 << 20, 4096, Band(0, 127)
    q, k, v, do, out = (
        torch.randn(1, length, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for heads in (16, 2, 2, 16, 16)
    )
    lse = torch.rand(1, 16, length, device="cuda") + 5  # any log-sum-exp that keeps probabilities small will do
    plan = plan_of(Attention(q, k, v, do, mask, 0.1), "spt")
    whole = hopper_calls.backward(do, q, k, v, out, lse, backward_spec(mask, 0.1), plan)
    parts = [t[:, :, -tail:] for t in (do, q, k, v, out, lse)]
    alone = hopper_calls.backward(*parts, backward_spec(mask, 0.1), plan)
    for a, b in zip(whole, alone, strict=True):
        assert torch.equal(a[:, :, -tail + 128 :], b[:, :, 128:])  # the first rows of the tail see keys before it
