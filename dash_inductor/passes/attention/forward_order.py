"""The place of an attention in the forward; a joint graph has the backwards in the opposite order."""

from __future__ import annotations

from torch.fx import Graph, Node

from ...frontends.attention import Found


class NodeOrder:
    """The places of the nodes of a graph, before anything in it is changed."""

    def __init__(self, graph: Graph) -> None:
        self._order: dict[Node, int] = {}
        self._first: dict[object, int] = {}  # of the nodes of one autograd function, forward and backward
        for place, node in enumerate(graph.nodes):
            self._order[node] = place
            if "seq_nr" in node.meta:
                self._first.setdefault(node.meta["seq_nr"], place)

    def of_forward(self, found: Found) -> int:
        """The place of the forward of an attention; the node's own where no forward is known."""
        if found.place is not None:
            return self._order[found.place]
        return self._first.get(found.node.meta.get("seq_nr"), self._order[found.node])
