"""The gradient of an embedding under deterministic algorithms: PyTorch's own kernel on CUDA, nothing else elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import dash_inductor
from dash_inductor.config import config
from dash_inductor.errors import FallbackError
from dash_inductor.graph.emit import Emitter
from dash_inductor.graph.nodes import op_name
from dash_inductor.model.reasons import Reason
from dash_inductor.passes.ops.embeddings import FEW, by_sums, takes_sums
from dash_inductor.records import records
from dash_inductor.records.records import Record, all_records, graphs, sites

from ...support.fakecuda import compiler
from ...support.forks import FAKE_GPU, run_forked
from ...support.graphs import rewrite_on, trace

OPERATOR = "aten::embedding_dense_backward"

STAYS = "aten.embedding_dense_backward.default"
PROGRAM = """
    import contextlib, json

    import torch
    import torch._inductor.compile_fx  # installs our pass: what looks at graphs comes after it
    import torch._inductor.config
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode

    import dash_inductor
    from dash_inductor.upstream import compat

    seen = []

    class Look:
        def apply(self, graph):
            seen.append([str(node.target) for node in graph.nodes])
            return 0

    compat.joint_passes().append(Look())
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.joint_graph_constant_folding = False  # it computes with real tensors

    def embed(indices, weight):
        return F.embedding(indices, weight).sin()

    found, records = [], []
    for deterministic, active, rows in ((True, True, 1000), (True, True, 2), (True, False, 1000), (False, True, 1000)):
        torch.use_deterministic_algorithms(deterministic)
        torch._dynamo.reset()
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"), contextlib.ExitStack() as stack:
            if not active:
                stack.enter_context(dash_inductor.disabled())
            indices, weight = torch.zeros(8, 512, dtype=torch.int64), torch.empty(rows, 64, requires_grad=True)
            with contextlib.suppress(Exception):
                torch.compile(embed)(indices, weight)
        found.append(seen.pop())
        assert dash_inductor.graphs() == dash_inductor.sites() == ()  # of attention
        records.append([str(record) for record in dash_inductor.all_records()])
        dash_inductor.clear_sites()
    print(json.dumps([found, records]))
"""


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_what_becomes_of_the_operator_on_cuda_under_deterministic_algorithms_while_we_are_active() -> None:
    output = run_forked(FAKE_GPU, PROGRAM).stdout
    (stays, few, off, default), records = json.loads(output.splitlines()[-1])
    assert [name for name in stays if "embedding" in name] == ["aten.embedding.default", STAYS]
    assert STAYS not in few + off + default
    assert not [name for name in stays + few if "index_put" in name]
    assert few.count("aten.sum.dim_IntList") == 2
    assert [len(of_graph) for of_graph in records] == [1, 1, 0, 0]
    texts = "PyTorch's kernel, which sorts the indices, in the place of Inductor's", "a sum over all indices"
    for (record,), text in zip(records[:2], texts, strict=True):
        assert record.startswith(f"embedding_dense_backward: embeddings, replaced ({text}")


def test_the_cpu_keeps_its_decomposition(deterministic: None) -> None:
    from torch._inductor.decomposition import decompositions

    decompose = decompositions[torch.ops.aten.embedding_dense_backward.default]
    grad, indices = torch.randn(3, 4), torch.tensor([0, 2, 2])
    found = decompose(grad, indices, 5, -1, False)
    assert torch.equal(found, torch.zeros(5, 4).index_add(0, indices, grad))


@pytest.mark.parametrize("padding", [-1, 0, 1])
@pytest.mark.parametrize("rows", [1, 2, FEW])
def test_tables_of_few_rows_are_sums(rows: int, padding: int) -> None:
    """Indices of any shape and integer type, or none; rows that nobody reads, and the row of the padding."""
    for shape, dtype in (((30,), torch.int64), ((4, 9), torch.int32), ((2, 3, 5), torch.int64), ((0, 7), torch.int64)):
        indices = torch.randint(0, min(rows, 3), shape).to(dtype)
        grad = torch.randn(*shape, 6)
        expected = torch.ops.aten.embedding_dense_backward(grad, indices, rows, padding, False)
        torch.testing.assert_close(by_sums(grad, indices, rows, padding), expected)


def test_other_tables_are_left_to_the_operator() -> None:
    for rows, by_number, sums in ((FEW, False, True), (FEW + 1, False, False), (0, False, False), (FEW, True, False)):
        assert takes_sums({"num_weights": rows, "scale_grad_by_freq": by_number}) is sums


def graph_of(rows: int, *, dynamic: bool = False) -> GraphModule:
    """The gradient of an embedding of [8, 512] indices in a graph, on a GPU that need not exist."""

    def backward(grad: Tensor, indices: Tensor) -> Tensor:
        return torch.ops.aten.embedding_dense_backward(grad.sin(), indices, rows, -1, False).cos()

    def inputs(length: Any) -> list[Tensor]:
        indices = torch.empty(8, length, dtype=torch.int64, device="cuda")
        return [torch.empty(8, length, 64, device="cuda"), indices]

    if not dynamic:
        return trace(backward, lambda: inputs(512))
    context, real = StatelessSymbolicContext([DimDynamic.DYNAMIC]), torch.empty(512)
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode:
        length = mode.from_tensor(real, symbolic_context=context).shape[0]
        return make_fx(backward)(*inputs(length))


def names(module: GraphModule) -> list[str]:
    return [op_name(node) for node in module.graph.nodes if op_name(node)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_records_of_a_graph_without_attention(dynamic: bool, deterministic: None) -> None:
    module, counted = graph_of(2, dynamic=dynamic), counters["dash_inductor"]["embeddings_replaced"]
    assert rewrite_on(module.graph)
    assert OPERATOR not in names(module)
    assert names(module).count("aten::sum") == 2
    assert not rewrite_on(module.graph)
    (record,) = all_records()
    assert isinstance(record, Record)
    assert (record.rewrite, record.op, record.status, record.reason) == ("embeddings", OPERATOR, "replaced", None)
    length = None if dynamic else 512
    assert record.facts == {"table": [2, 64], "indices": [8, length], "dtype": "float32", "device": "cuda:0"}
    assert graphs() == sites() == ()
    (graph,) = records.graphs_here()
    assert str(graph) == "graph (inference, compiled): 0 sites, 0 replaced; embeddings: 1 replaced"
    assert records.GraphRecord.from_json(graph.to_json()) == graph
    assert counters["dash_inductor"]["embeddings_replaced"] == counted + 1


def test_a_whole_operator_is_recorded_once(deterministic: None) -> None:
    module = graph_of(1000)
    for _ in range(2):
        assert not rewrite_on(module.graph)
    assert [(record.status, record.name) for record in all_records()] == [("replaced", "embedding_dense_backward")]
    assert names(module).count(OPERATOR) == 1


def test_an_error_leaves_the_operator_whole(monkeypatch: pytest.MonkeyPatch, deterministic: None) -> None:
    module = graph_of(2)
    text, call, calls = str(module.graph), Emitter.call, []

    def fail(self: Emitter, *args: Any, **kwargs: Any) -> Node:
        calls.append(call(self, *args, **kwargs))
        if len(calls) == 3:
            raise ZeroDivisionError("on purpose")
        return calls[-1]

    monkeypatch.setattr(Emitter, "call", fail)
    assert not rewrite_on(module.graph)
    (record,) = all_records()
    assert (record.status, record.reason, str(module.graph)) == ("fallback", Reason.INTERNAL_ERROR, text)
    assert record.detail.startswith("ZeroDivisionError: on purpose at ")
    calls.clear()
    config.strict, another = True, graph_of(2).graph
    with pytest.raises(FallbackError, match="these sites cannot be replaced"):
        rewrite_on(another)


def test_nothing_happens_while_dash_inductor_is_off(deterministic: None) -> None:
    with dash_inductor.disabled():
        assert not rewrite_on(graph_of(2).graph)
    assert all_records() == ()
