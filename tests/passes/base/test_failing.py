"""Whatever of ours fails, programs compile and run with PyTorch's numbers, and a record tells of it.

`python -m tests.passes.base.failing` throws in every function; here, in a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from dash_inductor.config import Config, config
from dash_inductor.frontends import all as frontends
from dash_inductor.model.reasons import Reason
from dash_inductor.passes.all import record_unseen, rewrite_graph
from dash_inductor.passes.base.rewrite import Result
from dash_inductor.records.records import Record, all_records, sites

from ...support.graphs import WITHOUT_KERNELS, capture, flash, joint_graph, rewrite_on, step, tensors, trace
from . import failing

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("deterministic")
SAMPLE = 60
"""Of how many functions one throws here."""


def test_errors_in_any_function() -> None:
    assert list(failing.failures(sample=SAMPLE)) == []


@dataclass(frozen=True)
class Half:
    """Replaces sines by cosines, and fails when it has replaced the first."""

    name = "half"
    leaves: bool = True

    def is_on(self, config: Config) -> bool:
        return True

    def apply(self, graph: Graph) -> Sequence[Result]:
        for node in graph.find_nodes(op="call_function", target=aten.sin.default):
            with graph.inserting_after(node):
                new = graph.call_function(aten.cos.default, node.args)
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            raise ZeroDivisionError("on purpose")
        return ()

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        if not self.leaves:
            raise ZeroDivisionError("again")
        nodes = graph.find_nodes(op="call_function", target=aten.sin.default)
        return [Result(Record("half", n.name, "aten::sin", "fallback", Reason.PASSES_OFF, cause)) for n in nodes]


def wave() -> Graph:
    return trace(lambda x: x.sin() + x.cos().sin(), lambda: [torch.empty(3)]).graph


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rewrite_that_fails_half_way(leaves: bool, caplog: pytest.LogCaptureFixture) -> None:
    graph = wave()
    text = str(graph)
    rewrite_graph(graph, [Half(leaves), *WITHOUT_KERNELS])
    graph.lint()
    assert str(graph) == text
    found = [(record.rewrite, record.status, record.reason, record.op) for record in all_records()]
    told = ("half", "fallback", Reason.INTERNAL_ERROR)
    assert found == ([(*told, "aten::sin")] * 2 if leaves else [(*told, "")])
    assert all("ZeroDivisionError: on purpose at " in record.detail for record in all_records())
    assert {r.levelname for r in caplog.records if r.name == "dash_inductor"} == {"WARNING"}


def test_strict_raises_the_error() -> None:
    config.strict = True
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        rewrite_graph(wave(), [Half()])


def test_a_failure_where_nothing_is_rewritten() -> None:
    graph = wave()
    assert not record_unseen([graph], "a setting", [Half(leaves=False)])
    (record,) = all_records()
    assert (record.rewrite, record.reason) == ("half", Reason.INTERNAL_ERROR)


@pytest.mark.parametrize("number", range(len(frontends.FRONTENDS)))
def test_a_frontend_that_fails(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other frontends go on, and what the net of unknown operators finds is recorded, too."""

    def fail(graph: Graph) -> Any:
        raise ZeroDivisionError("on purpose")

    fail.__module__ = "a_frontend"
    changed = list(frontends.FRONTENDS)
    changed[number] = fail
    monkeypatch.setattr(frontends, "FRONTENDS", tuple(changed))
    rewrite_on(joint_graph(flash).graph)
    failed = [record for record in sites() if record.reason is Reason.INTERNAL_ERROR]
    assert [record.op for record in failed] == ["a_frontend"]
    others = [record.status for record in sites() if record not in failed]
    assert others == (["fallback"] if number == 0 else ["replaced"])


def vmapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.vmap(torch.nn.functional.scaled_dot_product_attention)(q, k, v)


def per_sample(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    gradients = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    return sum(gradients, torch.zeros(()))


@pytest.mark.parametrize("function", [vmapped, per_sample])
@pytest.mark.parametrize("shape", [(3, 2, 24, 16), (3, 24, 16), (3, 2, 2, 24, 16), (3, 2, 2, 2, 24, 16)])
def test_transforms_compile(function: Any, shape: tuple[int, ...]) -> None:
    """Tensors of a transform have sizes that are not those of their memory, and end with the transform."""
    given = [tensor.detach() for tensor in tensors(*[shape] * 3)]
    with capture() as graphs:
        found = graphs.compile(function)(*given)
    assert torch.allclose(found, function(*given), atol=1e-5)


def test_a_transform_with_a_backward() -> None:
    with capture() as graphs:
        found = step(graphs.compile(vmapped), tensors(*[(3, 2, 24, 16)] * 3))
    for ours, theirs in zip(found, step(vmapped, tensors(*[(3, 2, 24, 16)] * 3)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
