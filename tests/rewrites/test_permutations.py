"""Stores by permutations and of few elements: what is rewritten, and values beside PyTorch's own stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dash_inductor.records.records import Record, all_records
from dash_inductor.rewrites import indices

from ..support.graphs import JointGraphs, capture
from ..support.stores import PERMUTATIONS, PROGRAMS, step

pytestmark = pytest.mark.usefixtures("deterministic")

STORES = ("aten::index_put", "aten::scatter_add", "aten::scatter")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(indices, "DEVICES", ("cpu",))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def left(graphs: JointGraphs) -> int:
    return sum(graphs.count(name) for name in STORES)


def records() -> list[Record]:
    return [record for record in all_records() if isinstance(record, Record)]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_programs(name: str, dtype: torch.dtype) -> None:
    """Results are as those of PyTorch's stores: exactly, or where several are added, up to a rounding; near fp64."""
    program, x = PROGRAMS[name], torch.randn(40, 64).to(dtype)
    exact = step(program, x.double())
    for dynamic in (False, True):
        with capture() as graphs:
            found = step(graphs.compile(program), x, dynamic=dynamic)
            assert left(graphs) == 0, graphs.texts
        expected = "permutations" if name in PERMUTATIONS else "few_indices"
        assert expected in {record.rewrite for record in records()}
        assert {record.status for record in records()} == {"replaced"}
        assert all(record.facts["shape"] for record in records())
        for ours, true in zip(found, exact, strict=True):
            assert (ours - true).norm() <= 4 * max(torch.finfo(dtype).eps, 2**-23) * true.norm()


@pytest.mark.parametrize("name", ["grouped", "labelled", "truncated", "ordered", "last"])
def test_generated_code(name: str) -> None:
    """Inductor's kernels, for two lengths: the same as eager PyTorch, which adds one after the other."""
    compiled = torch.compile(PROGRAMS[name])
    for count in (40, 56):
        x = torch.randn(count, 64)
        for ours, theirs in zip(step(compiled, x, dynamic=True), step(PROGRAMS[name], x), strict=True):
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)
    assert records()
