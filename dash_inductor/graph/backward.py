"""Functions that find the nodes of the backward in a joint graph, and whether it reads given nodes of the forward."""

from __future__ import annotations

from collections.abc import Iterable, Set

from torch.fx import Graph, Node

from .nodes import is_tangent, op_name

_PRODUCTS = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::matmul"})


def of_backward(graph: Graph) -> Set[Node]:
    """Return the tangents of a joint graph (gradients of outputs) and all nodes that depend on them."""
    found: set[Node] = set()
    for node in graph.nodes:
        reads = node.op == "call_function" and any(source in found for source in node.all_input_nodes)
        if reads or is_tangent(node):
            found.add(node)
    return found


def has_backward(nodes: Iterable[Node], backward: Set[Node]) -> bool:
    """Return whether the backward reads one of these nodes, or a node computed from them without a matrix product.

    Args:
        nodes: nodes of the forward, such as the probabilities of an attention.
        backward: the result of `of_backward`.
    """
    left, seen = list(nodes), set(nodes)
    while left:
        node = left.pop()
        for user in node.users:
            if user in backward:
                return True
            if user not in seen and op_name(user) not in _PRODUCTS:
                seen.add(user)
                left.append(user)
    return False
