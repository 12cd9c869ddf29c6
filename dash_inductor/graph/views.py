"""Nodes that are views, which share the memory of another node."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch.fx import Node

from ..upstream.dispatch import OpOverload

_UNMARKED = ("aten::_unsafe_view", "aten::reshape")
"""Operators whose result may share their argument's memory although the schema does not say so."""


def viewed(node: Node) -> Node | None:
    """Return the node that this one is a direct view of; None if it has its own memory or is not a call."""
    if node.op != "call_function":
        return None
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if node.target is operator.getitem:  # one of several views, such as those of `split`
        return source if is_view(source.target) else None
    return source if is_view(node.target) else None


def chain(node: Node) -> Iterator[Node]:
    """Yield the node, then the node that it is a view of, and so on; the last one owns the memory."""
    yield node
    while (source := viewed(node)) is not None:
        yield (node := source)


def base(node: Node) -> Node:
    """Return the node that owns the memory of this one, through all views."""
    *_, last = chain(node)
    return last


def shows_input(node: Node) -> bool:
    """Return whether the node is an input of the graph, or a view of one."""
    return base(node).op != "call_function"


def is_view(target: object) -> bool:
    """Return whether the target of a node is an operator whose results share the memory of an argument."""
    if not isinstance(target, OpOverload):
        return False
    schema = target._schema
    aliases = [result.alias_info for result in schema.returns]
    return schema.name in _UNMARKED or any(info is not None and not info.is_write for info in aliases)
