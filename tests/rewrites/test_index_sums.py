"""Sums by index in graphs: what is rewritten, values, what is shared, what is kept, and errors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.config import config
from dash_inductor.graph.emit import Emitter
from dash_inductor.model.reasons import Reason
from dash_inductor.operators.index_sums import index_sums as operator
from dash_inductor.records.records import Record, all_records
from dash_inductor.rewrites import index_sums

from ..support.graphs import capture
from ..support.index_sums import POOLS, PROGRAMS, Program, results, worst

OURS = "dash_inductor::index_sums"
SORT = "aten::sort"


def records() -> list[Record]:
    return [record for record in all_records() if isinstance(record, Record)]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    index = torch.randint(0, 20, (61,))
    index[::2] = 7
    return torch.randn(20, 6, dtype=torch.float64).to(dtype), index


SORTS = dict.fromkeys(("index_add", "scatter_add", "scatter_mean", "elements", "layers"), 2)
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
        with config.patch(index_sums="off"):
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
    assert (record.status, record.reason) == ("kept", Reason.INTERNAL_ERROR)
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


@pytest.mark.parametrize(
    ("mode", "padding"),
    [
        ("bilinear", "zeros"),
        ("nearest", "border"),
        pytest.param("bilinear", "reflection", marks=pytest.mark.full),
        pytest.param("bicubic", "reflection", marks=pytest.mark.full),
    ],
)
def test_grid_sample(mode: str, padding: str, on_the_cpu: None) -> None:
    """Gradients of the image and of positions inside and outside of it."""
    image, grid = torch.randn(2, 3, 6, 7), 2 * torch.randn(2, 4, 5, 2)

    def sample(image: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(image, grid, mode=mode, padding_mode=padding, align_corners=False)

    def gradients(function: Program, *tensors: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = function(*leaves)
        return list(torch.autograd.grad(out, leaves, out.detach().cos()))

    exact = gradients(sample, image.double(), grid.double())
    with capture() as graphs:
        found = gradients(graphs.compile(sample, dynamic=False), image, grid)
    assert (found[0].double() - exact[0]).norm() < 1e-5 * exact[0].norm()
    assert (found[1].double() - exact[1]).norm() <= 1e-5 * exact[1].norm()
    assert {record.rewrite for record in records()} == {"grid_sample", "index_sums"}
    assert {record.status for record in records()} == {"replaced"}
    assert not graphs.count("aten::grid_sampler_2d_backward") + graphs.count("aten::index_put")
