"""The gradient of an embedding is added to the other gradient of its weight row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dash_inductor.config import REWRITES as NAMES
from dash_inductor.config import config
from dash_inductor.passes.all import rewrite_graph
from dash_inductor.passes.ops import index_sums as sums
from dash_inductor.passes.ops import tied_embeddings
from dash_inductor.passes.ops.operators.index_sums import index_sums
from dash_inductor.passes.ops.tied_embeddings import TiedEmbeddingsRewrite
from dash_inductor.records.records import all_records

from ...support.graphs import trace

REWRITES = [TiedEmbeddingsRewrite()]
pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "DEVICES", ("cpu",))
    monkeypatch.setattr(tied_embeddings, "LEAST", 0)


def tensors(dtype: torch.dtype = torch.float32, rows: int = 300) -> list[Tensor]:
    torch.manual_seed(0)
    head = torch.randn(rows, 32).to(dtype)
    return [head, torch.randn(4, 64, 32).to(dtype), torch.randint(0, rows, (4, 64))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("padding", [-1, 7])
def test_values(dtype: torch.dtype, first: bool, padding: int) -> None:
    given = tensors(dtype)

    def step(head: Tensor, gradient: Tensor, indices: Tensor) -> Tensor:
        rows = torch.ops.aten.embedding_dense_backward(gradient, indices, 300, padding, False)
        return rows + head if first else head + rows

    module = trace(step, lambda: [torch.empty_like(tensor) for tensor in given])
    assert rewrite_graph(module.graph, REWRITES)
    assert not rewrite_graph(module.graph, REWRITES)
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    assert index_sums in targets
    compared = [node.args[1] for node in module.graph.nodes if node.target is torch.ops.aten.eq.Scalar]
    assert compared == ([7] if padding == 7 else []), "only a padding index is left out"
    assert torch.ops.aten.embedding_dense_backward.default not in targets
    wide = [tensor.double() if tensor.dtype.is_floating_point else tensor for tensor in given]
    torch.testing.assert_close(
        module(*given).double(), step(*wide), atol=2e-2 if dtype != torch.float32 else 1e-5, rtol=1e-2
    )
    (record,) = all_records()
    assert (getattr(record, "rewrite", ""), record.status) == ("tied_embeddings", "replaced")
    assert record.facts["table"] == [300, 32]  # type: ignore[union-attr]


@pytest.mark.parametrize("what", ["off", "small", "read twice", "frequency", "scaled", "broadcast"])
def test_what_stays(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "small":
        monkeypatch.setattr(tied_embeddings, "LEAST", 1 << 22)

    def step(head: Tensor, gradient: Tensor, indices: Tensor) -> list[Tensor]:
        rows = torch.ops.aten.embedding_dense_backward(gradient, indices, 300, -1, what == "frequency")
        added = torch.add(head[:1] if what == "broadcast" else head, rows, alpha=2 if what == "scaled" else 1)
        return [added, rows.sin()] if what == "read twice" else [added]

    module = trace(step, lambda: [torch.empty_like(tensor) for tensor in tensors()])
    with config.patch(rewrites=set(NAMES) - ({"tied_embeddings"} if what == "off" else set())):
        rewrite_graph(module.graph, REWRITES)
    assert index_sums not in [node.target for node in module.graph.nodes]
