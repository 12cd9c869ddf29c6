"""Sums by positions: how many values they add, in one product of dimensions; values, and what is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.passes.ops import ranges
from dash_inductor.passes.ops.operators.banded_matmul import band_sum
from dash_inductor.passes.ops.ranges import Band, band, weighted, windows
from dash_inductor.passes.ops.separable import factorized
from dash_inductor.records.records import Record, all_records
from dash_inductor.upstream.memory import WRITTEN_ONCE

from ...support.graphs import JointGraphs, capture
from ...support.index_sums import results, worst

INDEXED = torch.ops.aten._unsafe_index.Tensor
SUMS = ("aten::index_put", "aten::_unsafe_index_put", "aten::sort")

RESAMPLED: dict[str, tuple[tuple[int, ...], dict[str, Any], list[int]]] = {
    "nearest": ((6, 7), {"size": (9, 13), "mode": "nearest"}, [2, 2]),
    "exact": ((6, 7), {"size": (9, 13), "mode": "nearest-exact"}, [2, 2]),
    "bilinear": ((6, 7), {"scale_factor": 2.0, "mode": "bilinear"}, [4, 4]),
    "corners": ((6, 7), {"size": (12, 14), "mode": "bilinear", "align_corners": True}, [5, 5]),
    "smaller": ((6, 7), {"size": (3, 4), "mode": "bilinear"}, [1, 2]),
    "many": ((6, 7), {"scale_factor": 5.0, "mode": "nearest"}, [6, 6]),
    "one": ((1, 7), {"size": (25, 7), "mode": "bilinear"}, [25, 1]),
    "linear": ((7,), {"scale_factor": 2.5, "mode": "linear"}, [5]),
    "trilinear": ((3, 4, 5), {"scale_factor": 2.0, "mode": "trilinear"}, [4, 4, 4]),
    "bicubic": ((6, 7), {"scale_factor": 2.0, "mode": "bicubic"}, [8, 8]),
}


def records() -> list[Record]:
    return [record for record in all_records() if isinstance(record, Record)]


def left(graphs: JointGraphs) -> int:
    return sum(map(graphs.count, SUMS))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in ("exact", "corners", "many") else ()) for name in RESAMPLED],
)
def test_resampling(name: str, on_the_cpu: None) -> None:
    """Whatever the interpolation, the sums of it are one."""
    size, options, longest = RESAMPLED[name]
    x = torch.randn(2, 3, *size)

    def resampled(x: Tensor, _: Tensor) -> Tensor:
        return F.interpolate(x, **options)

    exact = results(resampled, x.double(), x)
    with capture() as graphs:
        found = results(graphs.compile(resampled, dynamic=False), x, x)
    assert worst(found, exact) < 1e-6
    (record,) = records()
    assert (record.rewrite, record.status, record.facts["longest"]) == ("index_ranges", "replaced", longest)
    assert not left(graphs)
    read = [node.args[1] for node in graphs.parts[0].find_nodes(op="call_function", target=INDEXED)]
    assert read
    assert all(WRITTEN_ONCE in index.meta for indices in read for index in indices if index is not None)


def test_a_sum_of_a_sum(on_the_cpu: None) -> None:
    """Padding that replicates, as it is decomposed on CUDA: a sum for each dimension."""

    def padded(x: Tensor, _: Tensor) -> Tensor:
        rows, columns = (torch.arange(-3, n + 2).clamp(0, n - 1) for n in x.shape[2:])
        return x[:, :, rows][:, :, :, columns]

    x = torch.randn(2, 3, 6, 7)
    exact = results(padded, x.double(), x)
    with capture() as graphs:
        found = results(graphs.compile(padded, dynamic=False), x, x)
    assert worst(found, exact) < 1e-6
    assert [(record.rewrite, record.facts["longest"]) for record in records()] == [("index_ranges", [4])] * 2
    assert not left(graphs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_tensor_that_is_resampled_twice_and_read_beside(dtype: torch.dtype, on_the_cpu: None) -> None:
    """The gradient of each is a sum of its own, and what else is added stays.  Channels are last, batches dynamic."""

    def function(x: Tensor, _: Tensor) -> Tensor:
        small, large = (F.interpolate(x, size=(n, n + 3), mode="bilinear") for n in (9, 15))
        return F.pad(small.sin(), (0, 6, 0, 6)) + large * x.mean().cos()

    x = torch.randn(2, 20, 6, 7).to(dtype).contiguous(memory_format=torch.channels_last)
    exact = results(function, x.double(), x)
    with capture() as graphs:
        compiled = graphs.compile(function, dynamic=False)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        found = results(compiled, x, x)
    assert worst(found, exact) < (1e-2 if dtype is torch.bfloat16 else 1e-12)
    assert [(record.rewrite, record.facts["sums"]) for record in records()] == [("index_ranges", 4)] * 2
    assert not left(graphs)
    read = [n.args[0].meta["val"] for n in graphs.parts[-1].find_nodes(op="call_function", target=band_sum)]
    gradients = [value.dtype for value in read if tuple(value.shape[2:]) in ((9, 12), (15, 18))]
    assert {*gradients} == {dtype}  # 16 bits are read, and fp32 is not written for it


def test_ranges_are_as_long_as_any_rounding_makes_them(on_the_cpu: None) -> None:
    """Three times: positions fall on whole numbers, or just below them."""
    x = torch.randn(1, 4, 30, 30)
    for scale, longest in ((3.0, [7, 7]), (2.0, [4, 4])):  # halves are exact
        with capture() as graphs:
            compiled = graphs.compile(lambda x, _: F.interpolate(x, scale_factor=scale, mode="bilinear"), dynamic=False)  # noqa: B023
            results(compiled, x, x)
        assert records()[-1].facts["longest"] == longest


def test_a_sum_that_is_no_product_is_summed_part_by_part(on_the_cpu: None) -> None:
    """Of each of three parts, an index and a weight differ in their own way."""
    weight = torch.linspace(0.5, 1, 12)

    def function(x: Tensor, _: Tensor) -> Tensor:
        one, other = ((torch.arange(12) + more).clamp(max=3) for more in (0, 1))
        return (
            x[:, one[:, None], one] * weight + x[:, one[:, None], other] + x[:, other[:, None], other] * weight[:, None]
        )

    x = torch.randn(3, 4, 4)
    exact = results(function, x.double(), x)
    with capture() as graphs:
        found = results(graphs.compile(function, dynamic=False), x, x)
    assert worst(found, exact) < 1e-6
    assert [(record.rewrite, record.facts["sums"]) for record in records()] == [("index_ranges", 1)] * 3
    assert not left(graphs)


def test_factors() -> None:
    """(a - b)(c + d) is a product; with another sign it is none."""
    terms: dict[Any, int] = {("a", "c"): 1, ("a", "d"): 1, ("b", "c"): -1, ("b", "d"): -1}
    assert factorized(terms) == [{"a": 1, "b": -1}, {"c": 1, "d": 1}]
    assert factorized({pair: -number for pair, number in terms.items()}) == [{"a": -1, "b": 1}, {"c": 1, "d": 1}]
    assert factorized(terms | {("b", "d"): 1}) is None
    assert factorized({pair: number for pair, number in terms.items() if pair != ("b", "d")}) is None
    assert factorized({}) is None


def dense(first: Tensor, last: Tensor, rows: int) -> tuple[Band, Tensor]:
    """A band with random weights, and its matrix."""
    numbers = torch.arange(rows)[:, None]
    matrix = torch.where(
        (numbers >= first) & (numbers <= last), torch.rand(rows, first.numel(), dtype=torch.float64), 0
    )
    return band(first, last, rows, lambda like, dtype: matrix.to(dtype)), matrix


@pytest.mark.parametrize("unrolled", [0, 4, 16])
def test_sums_of_bands(unrolled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch, three dimensions and columns; empty rows, positions in reverse, and rows that reach everywhere."""
    monkeypatch.setattr(ranges, "UNROLLED", unrolled)
    made = [
        dense(torch.tensor([0, 0, 3, 3, 4]), torch.tensor([1, 0, 3, 3, 5]), 7),
        dense(torch.tensor([2, 1, 0]), torch.tensor([2, 2, 1]), 3),
        dense(torch.arange(9) // 3, torch.arange(9) // 3, 3),
    ]
    assert [one.longest for one, _ in made] == [2, 3, 3]
    values = torch.randn(2, 5, 3, 9, 4, dtype=torch.float64)
    expected = torch.einsum("bxyzc,ix,jy,kz->bijkc", values, *(matrix for _, matrix in made))
    tables = []
    for one, _ in made:
        begins = one.begins(values.device)
        assert int(begins.min()) >= 0
        assert int(begins.max()) + one.longest <= one.positions
        tables += [begins, one.weights(values, dtype=torch.float64)]
    torch.testing.assert_close(weighted(values, *tables, batch=1), expected)
    values[0, 4, 2, 8, 0] = torch.inf
    found = weighted(values, *tables, batch=1)
    assert not found.isnan().any()
    reached = [matrix[:, at] != 0 for (_, matrix), at in zip(made, (4, 2, 8), strict=True)]
    assert torch.equal(found.isinf()[0, ..., 0], reached[0][:, None, None] & reached[1][:, None] & reached[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("longest", [3, 20])
def test_a_sum_computes_what_it_adds(longest: int, dtype: torch.dtype, on_the_cpu: None) -> None:
    """In a pointwise kernel or a reduction, of a dynamic batch, with an infinity that has no part."""
    begins = torch.tensor([0, 4, 1, 5], dtype=torch.int32)
    weights = torch.rand(longest, 4, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    weights[1] = 0
    x, other = (torch.randn(2, 25, 7, dtype=torch.float64).to(dtype) for _ in range(2))
    x[:, 2:3] = torch.inf
    weights[2, 0], weights[1, 2] = 0, 0

    def function(x: Tensor, other: Tensor, begins: Tensor, weights: Tensor) -> Tensor:
        return band_sum((x * other.sin()).exp(), [begins], [weights], 1)

    matrix = torch.zeros(4, 25, dtype=torch.float64)
    for row, begin in enumerate(begins.tolist()):
        matrix[row, begin : begin + longest] = weights[:, row]
    values = (x * other.sin()).exp().double()
    expected = torch.where(matrix[None, ..., None] != 0, matrix[None, ..., None] * values[:, None], 0).sum(2)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(other, 0)
    found = torch.compile(function)(x, other, begins, weights)
    assert found.dtype == weights.dtype
    for each in (found, function(x, other, begins, weights)):
        torch.testing.assert_close(each.double(), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-12, atol=0)
    torch.library.opcheck(band_sum, (x, [begins], [weights], 1), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("size", "count", "dtype"),
    [((8, 9), (8, 3), torch.float64), ((10, 7), (7, 5), torch.bfloat16), ((1, 5), (2, 5), torch.float32)],
    ids=str,
)
def test_adaptive_pooling(size: tuple[int, int], count: tuple[int, int], dtype: torch.dtype, on_the_cpu: None) -> None:
    """Windows of equal and of different lengths, that overlap, and more of them than elements."""
    x = torch.randn(2, 3, *size).to(dtype)

    def pool(x: Tensor, _: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, count)

    exact = results(pool, x.double(), x)
    with capture() as graphs:
        found = results(graphs.compile(pool, dynamic=False), x, x)
    assert found[1].dtype == dtype
    assert worst(found, exact) <= {torch.bfloat16: 1e-2, torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    assert not graphs.count("aten::_adaptive_avg_pool2d_backward")
    assert windows(8, 4).longest == 1


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({"size": (7, 9), "mode": "bilinear"}, [2, 3]),
        ({"size": (13, 9), "mode": "bicubic", "align_corners": True}, [4, 6]),
        ({"scale_factor": (0.4, 2.3), "mode": "bilinear"}, [3, 5]),
    ],
    ids=str,
)
def test_antialiased(options: dict[str, Any], longest: list[int], on_the_cpu: None) -> None:
    """Made smaller in one dimension and larger in the other, and channels last."""
    x = torch.randn(2, 3, 16, 7).contiguous(memory_format=torch.channels_last)

    def resampled(x: Tensor, _: Tensor) -> Tensor:
        return F.interpolate(x.sin(), antialias=True, **options)

    exact = results(resampled, x.double(), x)
    with capture() as graphs:
        found = results(graphs.compile(resampled, dynamic=False), x, x)
    assert worst(found, exact) < 1e-6
    assert [(record.rewrite, record.status) for record in records()] == [("index_ranges", "replaced")]
    assert records()[0].facts["longest"] == longest
