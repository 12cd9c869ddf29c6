"""Context parallelism: lets the backward reuse the keys and values that the forward received from other ranks."""

from __future__ import annotations

import sys
from collections.abc import Hashable

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...graph import sizes
from ...graph.nodes import op_name

_ROTATION = "_c10d_functional::all_to_all_single"
_ON_THE_WAY = {_ROTATION, "_c10d_functional::wait_tensor", "aten::slice", "aten::view", "aten::reshape", "aten::cat"}
"""The operators between the keys of a rank and the keys that another rank receives."""

_TO_THE_END = sys.maxsize
"""The end of a slice that extends to the end of its dimension."""


def share_rotations(graph: Graph) -> None:
    """Makes the backward read the keys and values that the forward received, instead of sending them again.

    Context parallelism with `set_rotate_method("alltoall")` rotates keys and values around a ring of ranks in the
    forward, and again in the backward.  The second rotation does not depend on gradients, so PyTorch's partitioner may
    place it anywhere among the rotations of the gradients, and its choice depends on the graph, which differs between
    ranks.  Ranks that send in different orders deadlock or mistake one tensor for another: with more than two ranks,
    gradients are wrong.  PyTorch's common subexpression elimination does not help, because the calls' arguments are
    different nodes with the same values.  This function merges calls whose arguments have the same values; what the
    forward received is then saved for the backward, as with `set_rotate_method("allgather")`.
    """
    if not any(op_name(node) == _ROTATION for node in graph.nodes):
        return
    first: dict[Hashable, Node] = {}
    merged: list[Node] = []
    for node in list(graph.nodes):
        if op_name(node) not in _ON_THE_WAY:
            continue
        found = first.setdefault((node.target, _text(node)), node)
        if found is not node:
            node.replace_all_uses_with(found)
            merged.append(node)
    for node in reversed(merged):
        graph.erase_node(node)


def _text(node: Node) -> Hashable:
    """A key of a call's arguments that is equal for arguments with the same values."""
    args = list(node.args)
    if op_name(node) == "aten::slice" and len(args) == 4 and _has_the_rest(node):
        args[3] = _TO_THE_END
    return _value(args), _value(sorted(node.kwargs.items()))


def _value(argument: object) -> Hashable:
    if isinstance(argument, list | tuple):
        return tuple(map(_value, argument))
    if isinstance(argument, Node):
        value = argument.meta.get("val")
        return value.node.expr if isinstance(value, torch.SymInt) else argument
    return argument  # numbers, types and names


def _has_the_rest(node: Node) -> bool:
    source, dim, _, end = node.args
    assert isinstance(source, Node)
    assert isinstance(dim, int)
    value = source.meta.get("val")
    size = end.meta.get("val") if isinstance(end, Node) else end
    if not isinstance(value, Tensor) or not isinstance(size, int | torch.SymInt):
        return False
    return sizes.same(size, value.shape[dim])
