"""The operator that a node of a graph calls, its arguments, and the node whose value it has."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..upstream.dispatch import HigherOrderOperator, OpOverload

_ALIASES = ("aten::alias", "aten::detach")

_TAGLESS = "alias detach lift_fresh lift_fresh_copy copy fill masked_fill floor_divide _to_copy __and__ __or__ __xor__"
_ELEMENTWISE = frozenset({"prims::device_put"} | {f"aten::{name}" for name in _TAGLESS.split()})
"""Elementwise in fact, though not all of their overloads carry the tag ``pointwise``."""


def op_name(node: Node) -> str:
    """``namespace::name`` of the operator that a node calls (higher-order: ``name``), "" for other nodes."""
    if node.op != "call_function":
        return ""
    if isinstance(node.target, OpOverload):
        return node.target._schema.name
    if isinstance(node.target, HigherOrderOperator):
        return str(node.target.name())
    return ""


def origin(node: Node) -> Node:
    """The node whose value this one has, behind aliases."""
    while op_name(node) in _ALIASES:
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def is_alias(node: Node) -> bool:
    """Whether the node has the value of another one."""
    return op_name(node) in _ALIASES


def is_elementwise(node: Node) -> bool:
    """Whether an element of the node's result depends on the elements at its place in the inputs alone."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or op_name(node) in _ELEMENTWISE


def is_joint(graph: Graph) -> bool:
    """Whether the graph is a forward with its backward, which PyTorch will take apart."""
    return any(str(node.target).startswith("tangents_") for node in graph.find_nodes(op="placeholder"))


def bind(node: Node) -> dict[str, Any]:
    """The node's arguments by their names in the operator's schema, defaults included: nodes or Python values.

    A higher-order operator has the names of its Python function.

    Raises:
        TypeError: a higher-order operator is not called with the arguments of its function.
    """
    if isinstance(node.target, HigherOrderOperator):
        given = inspect.signature(type(node.target).__call__).bind(node.target, *node.args, **node.kwargs)
        given.apply_defaults()
        return given.arguments
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema.arguments
    bound = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    bound.update(zip((argument.name for argument in schema), node.args, strict=False))  # the rest is in kwargs
    bound.update(node.kwargs)
    return bound


@dataclass(frozen=True)
class Argument:
    """A place among the arguments of a node, which another node may take while the graph is rewritten.

    Args:
        place: the name in the schema of the node's operator, or a number where the operator has no schema.
    """

    reader: Node
    place: str | int

    @property
    def value(self) -> Any:
        """The node or Python value that is there now."""
        return bind(self.reader)[self.place] if isinstance(self.place, str) else self.reader.args[self.place]
