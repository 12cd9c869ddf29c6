"""Sorts attentions by their position in the forward; a joint graph has the backwards in reverse order."""

from __future__ import annotations

from torch.fx import Graph, Node

from ...frontends.attention import Found


class NodeOrder:
    """The positions of a graph's nodes, recorded when this object is made: before the graph is changed."""

    def __init__(self, graph: Graph) -> None:
        self._order: dict[Node, int] = {}
        self._first: dict[object, int] = {}  # seq_nr -> position of the first node; forward and backward share seq_nr
        for place, node in enumerate(graph.nodes):
            self._order[node] = place
            if "seq_nr" in node.meta:
                self._first.setdefault(node.meta["seq_nr"], place)

    def of_forward(self, found: Found) -> int:
        """Returns the position of an attention's forward in the graph, by which attentions are sorted.

        If the forward is not known, this is the position of the first node with the backward's `seq_nr` or, if it has
        none, of the attention's own node.
        """
        if found.place is not None:
            return self._order[found.place]
        return self._first.get(found.node.meta.get("seq_nr"), self._order[found.node])
