"""Whatever is done to a graph can be taken back."""

from __future__ import annotations

import random

import pytest
import torch
from torch.fx import Graph, Node

from dash_inductor.graph.undo import Undo

from ..support.graphs import trace

aten = torch.ops.aten


def some_graph() -> Graph:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = (x.sin() + y).sort(dim=1)
        return values.cos() * x, places, (values @ y).relu().sum(0)

    return trace(function, lambda: [torch.empty(4, 4), torch.empty(4, 4)]).graph


def calls(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def change(graph: Graph, rng: random.Random) -> None:
    """One of the things that rewrites do."""
    node, kind = rng.choice(calls(graph)), rng.randrange(6)
    if kind == 0:
        with graph.inserting_before(node):
            graph.call_function(aten.neg.default, (rng.choice(graph.find_nodes(op="placeholder")),))
    elif kind == 1 and isinstance(node.meta.get("val"), torch.Tensor):
        node.replace_all_uses_with(graph.find_nodes(op="placeholder")[0])
    elif kind == 2 and not node.users:
        graph.erase_node(node)
    elif kind == 3:
        node.meta["mark"] = True
    elif kind == 4:
        node.target = aten.tan.default
    elif kind == 5:
        graph.output_node().prepend(node)


@pytest.mark.parametrize("seed", range(30))
def test_everything_is_taken_back(seed: int) -> None:
    graph, rng = some_graph(), random.Random(seed)
    before, names = str(graph), [node.name for node in graph.nodes]
    meta = [dict(node.meta) for node in graph.nodes]
    undo = Undo(graph)
    for _ in range(25):
        change(graph, rng)
    undo.restore()
    graph.lint()
    assert str(graph) == before
    assert [node.name for node in graph.nodes] == names
    assert [node.meta for node in graph.nodes] == meta
    assert graph.find_nodes(op="call_function", target=aten.sin.default)


def test_an_empty_change_keeps_every_node() -> None:
    graph = some_graph()
    nodes = list(graph.nodes)
    Undo(graph).restore()
    assert list(graph.nodes) == nodes
