"""Rewrites of other operators and every dtype that ATen takes: results as ATen's, or nothing is rewritten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor import compile_fx  # noqa: F401  # before rewrites, as in a compile
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor.passes.all import rewrite_graph
from dash_inductor.passes.ops.operators.unrolled_reductions import short_sum

from ...support.fuzzed import everything_on_the_cpu

pytestmark = pytest.mark.usefixtures("deterministic")

NAMES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
]
DTYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]
ADDED = {"uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"}

Program = Callable[[Tensor, Tensor], Tensor]


def _zeros(x: Tensor, rows: int) -> Tensor:
    return torch.zeros(rows, *x.shape[1:], dtype=x.dtype)


def _order(scores: Tensor) -> Tensor:
    return torch.argsort(scores, stable=True)


def _few_of(scores: Tensor, x: Tensor) -> Tensor:
    return scores.reshape(1, -1).topk(2).indices.t().expand(2, x.shape[1])


PROGRAMS: dict[str, Program] = {
    "sums of two": lambda s, x: _zeros(x, 8).index_put((_order(s) // 2,), x, accumulate=True),
    "sums of two onto": lambda s, x: x[:8].index_put((_order(s) // 2,), x, accumulate=True),
    "permuted": lambda s, x: _zeros(x, 16).index_put((_order(s),), x),
    "added once": lambda s, x: x.index_put((_order(s),), x, accumulate=True),
    "places": lambda s, x: _zeros(x, 20).index_put((_order(s),), x),
    "few": lambda s, x: _zeros(x, 16).scatter(0, _few_of(s, x), x[:2]),
    "few added": lambda s, x: _zeros(x, 16).scatter_add(0, _few_of(s, x), x[:2]),
    "any added": lambda s, x: _zeros(x, 5).index_add(0, (s * 9).long().abs() % 5, x),
    "any scattered": lambda s, x: _zeros(x, 5).scatter_add(0, ((s * 9).long().abs() % 5)[:, None].expand(x.shape), x),
    "short": lambda s, x: x.view(2, 8, -1).sum(1),
    "short of itself": lambda s, x: x.view(2, 8, -1).sum(1, dtype=x.dtype),
    "masked": lambda s, x: torch.where(s.topk(4).indices.reshape(-1, 1) >= 16, x[:4], x[4:8]),
    "median": lambda s, x: x.median(0).values,
    "histogram": lambda s, x: x.histc(4, -2, 2),
}


def values_of(dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    if dtype == torch.bool:
        return torch.rand(16, 6) < 0.4
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randint(-3, 4, (16, 6)).to(torch.float32).to(dtype)
    low = 0 if torch.iinfo(dtype).min == 0 else -3
    return torch.randint(low, 120, (16, 6)).to(dtype)  # sums leave the range of 8 bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_aten(name: str, dtype: torch.dtype) -> None:
    """Sums are of small numbers, which each dtype adds exactly, or wrap as it does."""
    scores, x = torch.randn(16), values_of(dtype)
    try:
        expected = PROGRAMS[name](scores, x)
        module = make_fx(PROGRAMS[name], select_decomp_table(), tracing_mode="fake")(scores, x)
    except (RuntimeError, NotImplementedError):
        pytest.skip("ATen has no such operator of this dtype")
    with everything_on_the_cpu():
        rewrite_graph(module.graph)
    module.recompile()
    found = module(scores, x)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found, expected)
    sums = [node.meta["val"].dtype for node in module.graph.nodes if node.target is short_sum]
    assert all(str(of).removeprefix("torch.") in ADDED for of in sums)  # a kernel would count booleans modulo two
