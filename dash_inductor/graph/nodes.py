"""The operator that a node of a graph calls, its arguments, and the node whose value it has."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..upstream.dispatch import HigherOrderOperator, OpOverload

_ALIASES = ("aten::alias", "aten::detach")

_TAGLESS = "alias detach lift_fresh lift_fresh_copy copy fill masked_fill floor_divide _to_copy __and__ __or__ __xor__"
_ELEMENTWISE = frozenset({"prims::device_put"} | {f"aten::{name}" for name in _TAGLESS.split()})
"""Elementwise in fact, though not all of their overloads carry the tag ``pointwise``."""


_FUNCTIONALIZED = ("auto_functionalized", "auto_functionalized_v2")
"""Higher-order operators that call an operator that writes to its arguments, and give what it has written."""


def called(node: Node) -> OpOverload | None:
    """The operator that a node calls, as it is or functionalized; None for other nodes."""
    if node.op != "call_function":
        return None
    if isinstance(node.target, OpOverload):
        return node.target
    operator = node.args[0] if is_functionalized(node) else None
    return operator if isinstance(operator, OpOverload) else None


def is_functionalized(node: Node) -> bool:
    """Whether a node calls an operator that writes to its arguments, and gives what it has written."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() in _FUNCTIONALIZED


def op_name(node: Node) -> str:
    """``namespace::name`` of the operator that a node calls, functionalized or not (higher-order: ``name``), "" for
    other nodes.
    """
    operator = called(node)
    if operator is not None:
        return operator._schema.name
    if node.op == "call_function" and isinstance(node.target, HigherOrderOperator):
        return str(node.target.name())
    return ""


def origin(node: Node) -> Node:
    """The node whose value this one has, behind aliases."""
    while op_name(node) in _ALIASES:
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def untouched(node: Node) -> Node:
    """The node whose value this one has, behind aliases, conversions to the type that it has, and dimensions of size 1
    that come and go.
    """
    while True:
        node = origin(node)
        source = node.args[0] if node.args else None
        if not isinstance(source, Node):
            return node
        inner = origin(source)
        if op_name(node) == "prims::convert_element_type" and _dtype(source) == node.args[1]:
            node = source
        elif op_name(node) == "aten::squeeze" and op_name(inner) == "aten::unsqueeze" and _undoes(node, inner):
            (node,) = inner.all_input_nodes
        else:
            return node


def _dtype(node: Node) -> object:
    return getattr(node.meta.get("val"), "dtype", None)


def _undoes(squeeze: Node, unsqueeze: Node) -> bool:
    value = unsqueeze.meta.get("val")
    if not isinstance(value, Tensor) or len(squeeze.args) < 2:  # all dimensions of size 1
        return False
    dims: tuple[Any, Any] = squeeze.args[1], unsqueeze.args[1]
    return all(isinstance(dim, int) for dim in dims) and dims[0] % value.dim() == dims[1] % value.dim()


def is_alias(node: Node) -> bool:
    """Whether the node has the value of another one."""
    return op_name(node) in _ALIASES


def is_elementwise(node: Node) -> bool:
    """Whether an element of the node's result depends on the elements at its place in the inputs alone."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or op_name(node) in _ELEMENTWISE


def is_joint(graph: Graph) -> bool:
    """Whether the graph is a forward with its backward, which PyTorch will take apart."""
    return any(map(is_tangent, graph.find_nodes(op="placeholder")))


def is_tangent(node: Node) -> bool:
    """Whether the node is an input of a joint graph that only the backward gets: the gradient of a result."""
    return node.op == "placeholder" and str(node.target).startswith("tangents_")


def bind(node: Node) -> dict[str, Any]:
    """The node's arguments by their names in the operator's schema, defaults included: nodes or Python values.

    Of a functionalized call, those that it is not given as they are, tensors to write to, are missing or None.  A
    higher-order operator has the names of its Python function.

    Raises:
        TypeError: a higher-order operator is not called with the arguments of its function.
    """
    operator = called(node)
    if operator is None:
        assert isinstance(node.target, HigherOrderOperator)
        named = inspect.signature(type(node.target).__call__).bind(node.target, *node.args, **node.kwargs)
        named.apply_defaults()
        return named.arguments
    schema = operator._schema.arguments
    bound = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    given = () if is_functionalized(node) else node.args  # the rest is in kwargs
    bound.update(zip((argument.name for argument in schema), given, strict=False))
    own = {argument.name for argument in schema}
    bound.update({name: value for name, value in node.kwargs.items() if name in own})
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
