"""Snapshots of FX graphs, by which changes are undone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg


class Undo:
    """A snapshot of a graph, to which `restore` returns the graph; taking it costs about a microsecond per node.

    Values and other objects in the nodes' metadata are not copied: code that changes a graph must replace these
    objects, not modify them.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes = [
            (node, node.op, node.target, node.args, node.kwargs, node.name, node.type, dict(node.meta))
            for node in graph.nodes
        ]

    def restore(self) -> None:
        """Restore the graph to the snapshot.

        Nodes that still exist stay the same objects; erased ones are recreated with their names.
        """
        graph, present = self._graph, set(self._graph.nodes)
        live: dict[Node, Node] = {}
        before: Node | None = None
        for node, op, target, _, _, name, type_, _ in self._nodes:
            if node in present:
                live[node] = node
            else:
                with graph.inserting_before(next(iter(graph.nodes), None)):
                    live[node] = graph.create_node(op, target, name=name, type_expr=type_)
                live[node].name = name  # create_node appends a number to a used name
            if before is not None and before.next is not live[node]:
                before.append(live[node])
            elif before is None and next(iter(graph.nodes)) is not live[node]:
                next(iter(graph.nodes)).prepend(live[node])
            before = live[node]
        for node, _, target, args, kwargs, _, _, meta in self._nodes:
            found = live[node]
            if found.target is not target:
                found.target = target
            of_then = map_arg((args, kwargs), live.__getitem__)
            if (found.args, found.kwargs) != of_then:
                found.args, found.kwargs = of_then
            found.meta = meta
        kept = set(live.values())
        for node in reversed(list(_others(graph, kept))):
            graph.erase_node(node)


def _others(graph: Graph, kept: set[Node]) -> Iterator[Any]:
    return (node for node in graph.nodes if node not in kept)
