"""Replacing is all or nothing: whatever raises, the graph is as it was and the record says not replaced, or it is
replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.fx import Graph, GraphModule, Node

from dash_inductor.graph import emit
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import clear_sites

from ...support.graphs import BACKWARD, FORWARD, causal_bias, efficient, joint_graph, op_counts, rewritten

pytestmark = pytest.mark.usefixtures("deterministic")


def site() -> GraphModule:
    return joint_graph(efficient, bias=lambda: causal_bias(128))


class FailOnce:
    """Wraps a method: its call number `number` raises after it has done its work, or before; all others pass."""

    def __init__(self, method: Callable[..., Any], number: int, after: bool) -> None:
        self.method, self.number, self.after, self.calls = method, number, after, 0

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.number and not self.after:
                raise ZeroDivisionError("on purpose")
            result = self.method(instance, *args, **kwargs)
            if self.calls == self.number:
                raise ZeroDivisionError("on purpose")
            return result

        return call


def calls_of(owner: type, name: str) -> int:
    """How often replacing one site calls a method."""
    counter, module = FailOnce(getattr(owner, name), 0, after=False), site()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counter)
        rewritten(module)
    clear_sites()
    return counter.calls


STEPS = [
    (emit.Emitter, "call", False),
    (emit.Emitter, "call", True),
    (Graph, "create_node", False),
    (Node, "replace_all_uses_with", False),
    (Node, "replace_all_uses_with", True),
]


@pytest.mark.parametrize(("owner", "name", "after"), STEPS)
def test_an_error_in_any_step_leaves_the_graph_as_it_was(owner: type, name: str, after: bool) -> None:
    count = calls_of(owner, name)
    assert count >= 3
    for number in range(1, count + 1):
        module = site()
        text = str(module.graph)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, FailOnce(getattr(owner, name), number, after))
            graph, record = rewritten(module)
        assert (record.status, record.reason) == ("fallback", Reason.INTERNAL_ERROR), number
        assert record.detail.startswith("ZeroDivisionError: on purpose at ")
        assert str(graph) == text, number
        clear_sites()


def test_an_error_while_old_nodes_are_erased_leaves_a_replaced_site(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing reads the old nodes any more: what cannot be erased is dead, not half replaced."""
    count = calls_of(Graph, "erase_node")
    assert count >= 5
    for number in range(1, count + 1):
        caplog.clear()
        module = site()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Graph, "erase_node", FailOnce(Graph.erase_node, number, after=False))
            graph, record = rewritten(module)
        assert record.status == "replaced"
        assert (op_counts(graph)[FORWARD], op_counts(graph)[BACKWARD]) == (1, 1)
        assert [r.levelname for r in caplog.records if r.name == "dash_inductor"] == ["WARNING"]
        assert not [node for node in read_by_the_output(graph) if "efficient" in str(node.target)]
        clear_sites()


def read_by_the_output(graph: Graph) -> set[Node]:
    """Every node on which the outputs depend."""
    found: set[Node] = set()
    pending = [graph.output_node()]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found
