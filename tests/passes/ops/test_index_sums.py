"""Sums by index in graphs: what is rewritten, values, what is shared, what is not replaced, and errors."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.config import REWRITES, config
from dash_inductor.graph.emit import Emitter
from dash_inductor.model.reasons import Reason
from dash_inductor.passes.ops import grid_sample, index_sums
from dash_inductor.passes.ops.operators.index_sums import index_sums as operator
from dash_inductor.records.records import Record, all_records

from ...support.graphs import capture
from ...support.index_sums import POOLS, PROGRAMS, Program, results, worst

OURS = "dash_inductor::index_sums"
SORT = "aten::sort"


def records() -> list[Record]:
    return [record for record in all_records() if isinstance(record, Record)]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    index = torch.randint(0, 20, (61,))
    index[::2] = 7
    return torch.randn(20, 6, dtype=torch.float64).to(dtype), index


SORTS = dict.fromkeys(("index_add", "scatter_add", "scatter_mean", "elements", "layers", "edges"), 2)
"""Sorts of a program where they are not one: of the index of a forward, and of another one of its backward."""
NAMES = [name for name in PROGRAMS if name != "embedding"]  # whose gradient the CPU decomposes


@pytest.mark.parametrize("name", NAMES)
def test_values(name: str, on_the_cpu: None) -> None:
    x, index = inputs()
    exact = results(PROGRAMS[name], x.double(), index)
    with capture() as graphs:
        found = results(graphs.compile(PROGRAMS[name], dynamic=False), x, index)
    assert worst(found, exact) < 1e-6
    assert {(record.rewrite, record.status) for record in records()} == {("index_sums", "replaced")}
    assert graphs.count(OURS)
    assert not graphs.count("aten::scatter_add") + graphs.count("aten::index_put")
    assert graphs.count(SORT) == SORTS.get(name, 1)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("two", torch.float64), ("elements", torch.float64), ("index_add", torch.bfloat16), ("layers", torch.bfloat16)],
    ids=str,
)
def test_dynamic_shapes(name: str, dtype: torch.dtype, on_the_cpu: None) -> None:
    x, index = inputs(dtype)
    exact = results(PROGRAMS[name], x.double(), index)
    with capture() as graphs:
        found = results(graphs.compile(PROGRAMS[name], dynamic=True), x, index)
    assert worst(found, exact) < (1e-2 if dtype is torch.bfloat16 else 1e-12)
    assert {record.status for record in records()} == {"replaced"}


def test_an_index_is_sorted_once_for_forward_and_backward(on_the_cpu: None) -> None:
    """Also after PyTorch has taken the graph apart."""

    def function(x: Tensor, index: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, index, x[index].sin())

    x, index = inputs()
    with capture() as graphs:
        results(graphs.compile(function, dynamic=False), x, index)
    assert (graphs.count(OURS), graphs.count(SORT)) == (2, 1)
    assert sum(part[SORT] for part in graphs.partitions) == 1


def test_rows_that_are_named_are_read_where_they_are(on_the_cpu: None) -> None:
    """Once for two layers and their backwards; not where somebody else reads the values, too."""

    def layers(x: Tensor, index: Tensor) -> Tensor:
        other = index.flip(0)
        for _ in range(2):
            x = 0.5 * torch.zeros_like(x).index_add(0, index, x[other])
        return x

    def stays(x: Tensor, index: Tensor) -> Tensor:
        values = x[index.flip(0)]
        return torch.zeros_like(x).index_add(0, index, values) + values.sum()

    x, index = inputs()
    exact = results(layers, x.double(), index)
    for program, named in ((layers, 2), (stays, 0)):
        with capture() as graphs:
            found = results(graphs.compile(program, dynamic=False), x, index)
        assert graphs.texts[0].count("torch.int32") == named  # rows that are named at places of an index
        if program is layers:
            assert worst(found, exact) < 1e-6
            assert (graphs.count(OURS), graphs.count(SORT)) == (4, 2)
            index[5] = 40
            with pytest.raises((IndexError, RuntimeError), match=r"out of|range"):
                graphs.compile(program, dynamic=False)(x, index)
            index[5] = 4


def test_keys_are_as_narrow_as_rows_let_them(on_the_cpu: None) -> None:
    found: Counter[torch.dtype] = Counter()
    for rows in (254, 255, 32766, 32767):
        index = index_sums.Index((None,), (rows,), wraps=True)  # type: ignore[arg-type]  # stands for a tensor
        keys = index_sums._keys(index, torch.tensor([0, -1, rows - 1, rows, -rows - 1]))
        assert keys.tolist() == [0, rows - 1, rows - 1, rows + 1, rows + 1]
        found[keys.dtype] += 1
    assert found == {torch.uint8: 1, torch.int16: 2, torch.int32: 1}


def test_an_index_out_of_bounds_is_an_error(on_the_cpu: None) -> None:
    x, index = inputs()
    with capture() as graphs:
        compiled = graphs.compile(lambda x, index: torch.zeros_like(x).index_add(0, index, x.repeat(4, 1)[:61]))
        for bad in (20, -21, 1 << 40):
            index[3] = bad
            with pytest.raises((IndexError, RuntimeError), match=r"out of|range"):
                compiled(x, index)


def test_an_embedding_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of the padding has no gradient."""
    index = index_sums.Index((None,), (30,), left_out=4)  # type: ignore[arg-type]  # stands for a tensor
    indices, grad = torch.randint(0, 30, (5, 40)), torch.randn(5, 40, 6)
    keys, order = index_sums._keys(index, indices).sort(stable=True)
    found = operator(None, grad.reshape(1, 200, 6), keys, order, 30)[0]
    expected = torch.ops.aten.embedding_dense_backward(grad, indices, 30, 4, False)
    torch.testing.assert_close(found, expected)


def test_small_sums_and_others_are_left(deterministic: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_sums, "DEVICES", ("cpu",))
    x, index = inputs()

    def programs(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        """One that adds nothing, and one of integers."""
        whole = torch.zeros(20, 6, dtype=torch.int64).index_add(0, index, torch.ones(61, 6, dtype=torch.int64))
        return torch.zeros_like(x).index_put((index[:20],), x), whole

    with capture() as graphs:
        results(graphs.compile(PROGRAMS["rows"]), x, index)
        monkeypatch.setattr(index_sums, "LEAST", 0)
        graphs.compile(programs)(x, index)
        torch._dynamo.reset()
        with config.patch(rewrites=set(REWRITES) - {"index_sums"}):
            results(graphs.compile(PROGRAMS["rows"]), x, index)
    assert records() == []


def test_an_error_leaves_the_graph(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(Emitter, "inline", fail)
    x, index = inputs()
    exact = results(PROGRAMS["rows"], x, index)
    with capture() as graphs:
        assert worst(results(graphs.compile(PROGRAMS["rows"]), x, index), exact) == 0
    (record,) = records()
    assert (record.status, record.reason) == ("fallback", Reason.INTERNAL_ERROR)
    assert record.detail.startswith("ZeroDivisionError: on purpose at ")


@pytest.mark.parametrize("name", list(POOLS))
def test_pooling_by_the_largest_element(name: str, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few elements there are."""
    monkeypatch.setattr(index_sums, "LEAST", 1 << 40)
    x = torch.randn(2, 3, 8, 7, 9)
    exact = results(lambda x, _: POOLS[name](x), x.double(), x)
    with capture() as graphs:
        found = results(graphs.compile(lambda x, _: POOLS[name](x), dynamic=False), x, x)
    assert worst(found, exact) < 1e-6
    assert {(record.rewrite, record.status) for record in records()} == {("index_sums", "replaced")}
    assert graphs.count(OURS) == 1


SAMPLED = [
    (dims, mode, padding, corners)
    for dims, mode, padding, corners in itertools.product((2, 3), range(3), range(3), (False, True))
    if (dims, mode) != (3, grid_sample.CUBIC)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bags_of_the_largest_rows(dtype: torch.dtype, on_the_cpu: None) -> None:
    x, index = torch.randn(20, 6).to(dtype), torch.randint(0, 20, (60,))

    def largest(x: Tensor, index: Tensor) -> Tensor:
        return F.embedding_bag(index, x, torch.tensor([0, 7, 40]), mode="max", padding_idx=3)

    exact = results(largest, x.double(), index)
    with capture() as graphs:
        found = results(graphs.compile(largest, dynamic=False), x, index)
    assert worst(found, exact) < (1e-2 if dtype is torch.bfloat16 else 1e-6)
    assert {(record.rewrite, record.status) for record in records()} == {("index_sums", "replaced")}
    assert not graphs.count("aten::_embedding_bag_backward")


def test_an_empty_bag_adds_nothing() -> None:
    """Its largest row has the number -1 on CUDA."""
    index = index_sums.Index((None,), (30, 2), along=0, left_out=-1)  # type: ignore[arg-type]  # stands for a tensor
    assert index_sums._keys(index, torch.tensor([[0, 29], [-1, 3], [30, -2]])).tolist() == [0, 59, 60, 7, 61, 61]


@pytest.mark.parametrize(("dims", "mode", "padding", "corners"), SAMPLED)
def test_grid_sample_by_other_operators(dims: int, mode: int, padding: int, corners: bool) -> None:
    """Values and gradients, at positions inside and outside of the image, and on its border."""
    image = torch.randn(2, 3, *[4, 5, 6][:dims], dtype=torch.float64)
    grid = 1.7 * torch.randn(2, *[3, 4, 7][:dims], dims, dtype=torch.float64)
    grid.view(-1)[:3] = torch.tensor([1.0, -1.0, 0.0])
    leaves = image.requires_grad_(), grid.requires_grad_()
    modes = ["bilinear", "nearest", "bicubic"][mode], ["zeros", "border", "reflection"][padding]
    expected = F.grid_sample(*leaves, *modes, corners)
    torch.testing.assert_close(grid_sample.sampled(*leaves, mode, padding, corners), expected)
    grad_out = torch.randn_like(expected)
    args = {"interpolation_mode": mode, "padding_mode": padding, "align_corners": corners}
    for i, exact in enumerate(torch.autograd.grad(expected, leaves, grad_out)):
        torch.testing.assert_close(grid_sample.gradient(args, i)(grad_out, *leaves), exact)


@pytest.mark.parametrize("mode", range(3))
def test_positions_outside_of_all_read_nothing(mode: int) -> None:
    """NaN, infinity and numbers that no integer holds give zeros, whatever the image and gradients are there."""
    image, grid = torch.randn(1, 2, 4, 5), torch.randn(1, 3, 3, 2)
    grid[0, 1] = torch.tensor([[torch.nan, 0], [torch.inf, 0.5], [0.1, -1.6]])
    image[..., 0, 0] = torch.inf
    leaves = image.requires_grad_(), grid.requires_grad_()
    out = grid_sample.sampled(*leaves, mode, grid_sample.ZEROS, False)
    assert not out[:, :, 1, :2].any()
    grad_out = torch.randn_like(out)
    grad_out[:, :, 1, :2] = torch.inf
    grad_image, grad_grid = torch.autograd.grad(out, leaves, grad_out, materialize_grads=True)
    assert not grad_grid[0, 1, :2].any()
    near = torch.tensor([0, 1, 2, 5, 6, 7, 8])
    some = grid.detach().flatten(1, 2)[:, None, near]
    expected = F.grid_sample(image, some, ["bilinear", "nearest", "bicubic"][mode], "zeros", False)
    (exact,) = torch.autograd.grad(expected, image, grad_out.flatten(2)[:, :, None, near])
    torch.testing.assert_close(grad_image, exact)


@pytest.mark.parametrize(("mode", "size"), [("bilinear", (6, 7)), ("nearest", (6, 7)), ("bilinear", (4, 5, 6))])
def test_grid_sample(mode: str, size: tuple[int, ...], on_the_cpu: None) -> None:
    """Each corner is one sum, with one index for all of them."""
    image, grid = torch.randn(2, 3, *size), 2 * torch.randn(2, *(n - 1 for n in size), len(size))

    def sample(image: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(image, grid, mode=mode, padding_mode="zeros", align_corners=False)

    def gradients(function: Program, *tensors: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = function(*leaves)
        return list(torch.autograd.grad(out, leaves, out.detach().cos()))

    exact = gradients(sample, image.double(), grid.double())
    with capture() as graphs:
        found = gradients(graphs.compile(sample, dynamic=False), image, grid)
    for a, b in zip(found, exact, strict=True):
        assert (a.double() - b).norm() <= 1e-5 * b.norm()
        assert a.stride() == b.stride()
    assert {record.status for record in records()} == {"replaced"}
    corners = 1 if mode == "nearest" else 2 ** len(size)
    assert [record.rewrite for record in records()] == ["grid_sample", *["index_sums"] * corners]
    assert graphs.count(SORT) == 1
    assert not graphs.count("aten::grid_sampler_2d_backward") + graphs.count("aten::index_put")


@pytest.mark.parametrize("name", ["rows", "two", "gather", "batches", "scatter_mean", "edges"])
def test_few_rows(name: str, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sorted, except where rows are counted or named."""
    monkeypatch.setattr(index_sums, "ONE_HOT_LEAST", 0)
    monkeypatch.setattr(index_sums, "ONE_HOT_ROWS", {torch.float32: 20 * 6})
    x, index = inputs()
    exact = results(PROGRAMS[name], x.double(), index)
    with capture() as graphs:
        found = results(graphs.compile(PROGRAMS[name], dynamic=False), x, index)
    assert worst(found, exact) < 1e-6
    assert bool(graphs.count(SORT)) is (name in ("scatter_mean", "edges"))
    assert graphs.count("dash_inductor::few_sums") >= (name not in ("scatter_mean", "edges"))


@pytest.mark.parametrize(
    ("rows", "count", "columns", "dtype", "few"),
    [
        (32, 1 << 14, 2880, torch.bfloat16, True), (128, 1 << 14, 64, torch.float16, True),
        (129, 1 << 14, 64, torch.bfloat16, False), (32, 1 << 14, 64, torch.float32, False),
        (8, 1 << 14, 64, torch.float32, True), (8, 1 << 14, 64, torch.float64, False),
        (8, 1 << 9, 64, torch.bfloat16, False),
    ],
)  # fmt: skip
def test_the_rule_of_few_rows(rows: int, count: int, columns: int, dtype: torch.dtype, few: bool) -> None:
    graph = torch.fx.Graph()
    values, index = graph.placeholder("values"), graph.placeholder("index")
    values.meta["val"] = torch.empty(count, columns, dtype=dtype, device="meta")
    found = index_sums.Sum(None, values, index_sums.Index((index,), (rows,)), (rows, columns), 0, 1)
    assert index_sums.takes_products(found) is few
