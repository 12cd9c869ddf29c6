"""ALiBi slopes of flash-attn on a GPU: values, bits, kernels, and the memory that a bias of all pairs would take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor import config, sites
from dash_inductor.model import Band
from dash_inductor.records.records import clear_sites

from ..support.flash_attn import fa2
from ..support.repeats import differing_runs
from ..support.slopes import exact

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
BATCH, Q_HEADS, KV_HEADS = 2, 8, 2


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch._dynamo.reset()
    clear_sites()
    yield
    torch.cuda.empty_cache()


def slopes_of(batched: bool) -> Tensor:
    size = (BATCH, Q_HEADS) if batched else (Q_HEADS,)
    return torch.rand(size, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def inputs(q_len: int, kv_len: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [(BATCH, q_len, Q_HEADS, dim), (BATCH, kv_len, KV_HEADS, dim), (BATCH, kv_len, KV_HEADS, dim)]
    return [torch.randn(size, device="cuda", generator=generator).to(dtype).requires_grad_() for size in sizes]


def run(function: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    out = function(*leaves)
    grad_out = torch.linspace(-1, 1, out.shape[-1], device="cuda", dtype=out.dtype).expand_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


@pytest.mark.parametrize(
    "facts", [{}, {"causal": True}, {"window": (70, 0)}, {"causal": True, "softcap": 5.0}], ids=str
)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_values_and_bits(dim: int, dtype: torch.dtype, batched: bool, facts: dict[str, Any]) -> None:
    for q_len, kv_len in ((300, 300), (300, 515), (515, 300)):
        torch._dynamo.reset()
        clear_sites()
        function = functools.partial(fa2, slopes=slopes_of(batched), **facts)
        leaves, compiled = inputs(q_len, kv_len, dim, dtype), torch.compile(function)
        with config.patch(strict=True):
            found = run(compiled, leaves)
        (record,) = sites()
        assert record.plan is not None
        assert (record.plan.kernel, record.plan.forward) == ("portable", "portable")
        assert record.mask.endswith("+ slopes")
        expected = run(function, [t.detach().double().requires_grad_() for t in leaves])
        for ours, true in zip(found, expected, strict=True):
            error, size = float((ours.double() - true).abs().max()), max(0.5, float(true.abs().max()))
            assert error <= (1e-4 if dtype is torch.float32 else 2e-2) * size, f"{error:.2e} of {size:.2e}"
        assert differing_runs(lambda: run(compiled, leaves), 20, load=True) == 0  # noqa: B023  # called here


def test_no_bias_of_all_pairs_is_made() -> None:
    length = 8192
    leaves = inputs(length, length, 64, torch.bfloat16)
    compiled = torch.compile(functools.partial(fa2, causal=True, slopes=slopes_of(False)))
    run(compiled, leaves)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(compiled, leaves)
    assert torch.cuda.max_memory_allocated() - before < 4 * Q_HEADS * length * length / 4


def test_far_positions_are_exact() -> None:
    """Distances are integers in fp32, and the products with slopes are those of a bias."""
    leaves = inputs(64, 20000, 64, torch.float32)
    slopes = slopes_of(False)
    with config.patch(strict=True):
        out = torch.compile(functools.partial(fa2, slopes=slopes))(*leaves)
    q, k, v = (t.detach().transpose(1, 2) for t in leaves)
    right = exact([q, k, v, torch.zeros_like(q)], slopes, Band(), 64**-0.5)[0]
    assert (out.transpose(1, 2) - right).abs().max() < 1e-4
