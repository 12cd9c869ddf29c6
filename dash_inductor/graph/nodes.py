"""Helpers for FX nodes: the operator that a node calls, its arguments by name, and the node whose value it has."""

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
"""Operators that are elementwise although not all of their overloads have the tag ``pointwise``."""


_FUNCTIONALIZED = ("auto_functionalized", "auto_functionalized_v2")
"""Higher-order operators that call a mutating operator and return what it has written."""


def called(node: Node) -> OpOverload | None:
    """Return the operator that a node calls, directly or through `auto_functionalized`; None for other nodes."""
    if node.op != "call_function":
        return None
    if isinstance(node.target, OpOverload):
        return node.target
    operator = node.args[0] if is_functionalized(node) else None
    return operator if isinstance(operator, OpOverload) else None


def is_functionalized(node: Node) -> bool:
    """Return whether a node calls a mutating operator through `auto_functionalized`."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() in _FUNCTIONALIZED


def op_name(node: Node) -> str:
    """Return ``namespace::name`` of the operator that a node calls, functionalized or not; "" for other nodes.

    For a higher-order operator it is its ``name``.
    """
    operator = called(node)
    if operator is not None:
        return operator._schema.name
    if node.op == "call_function" and isinstance(node.target, HigherOrderOperator):
        return str(node.target.name())
    return ""


def origin(node: Node) -> Node:
    """Return the node at the beginning of a chain of aliases that ends at `node`; `node` itself if it is no alias."""
    while op_name(node) in _ALIASES:
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def untouched(node: Node) -> Node:
    """Return the node whose value `node` has, looking through aliases and other operators that change nothing.

    These are casts to the dtype that a tensor already has, and an unsqueeze that a squeeze undoes.
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
    if not isinstance(value, Tensor) or len(squeeze.args) < 2:  # squeezes all dimensions of size 1
        return False
    dims: tuple[Any, Any] = squeeze.args[1], unsqueeze.args[1]
    return all(isinstance(dim, int) for dim in dims) and dims[0] % value.dim() == dims[1] % value.dim()


def is_alias(node: Node) -> bool:
    """Return whether the node is an alias of another one."""
    return op_name(node) in _ALIASES


def is_elementwise(node: Node) -> bool:
    """Return whether each element of the result depends only on the elements of the inputs at the same index."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or op_name(node) in _ELEMENTWISE


def is_joint(graph: Graph) -> bool:
    """Return whether the graph is a joint graph of forward and backward, which PyTorch will partition."""
    return any(map(is_tangent, graph.find_nodes(op="placeholder")))


def is_tangent(node: Node) -> bool:
    """Return whether the node is an input of a joint graph that only the backward gets: the gradient of an output."""
    return node.op == "placeholder" and str(node.target).startswith("tangents_")


def bind(node: Node) -> dict[str, Any]:
    """Return the node's arguments by their names in the operator's schema, including defaults: nodes or Python values.

    For a call through `auto_functionalized`, tensors that the operator writes to are missing or None if they are
    passed in another form.  For a higher-order operator, the names are those of its Python function.

    Raises:
        TypeError: the arguments of a higher-order operator do not match its function.
    """
    operator = called(node)
    if operator is None:
        assert isinstance(node.target, HigherOrderOperator)
        named = inspect.signature(type(node.target).__call__).bind(node.target, *node.args, **node.kwargs)
        named.apply_defaults()
        return named.arguments
    schema = operator._schema.arguments
    bound = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    given = () if is_functionalized(node) else node.args  # arguments are in kwargs
    bound.update(zip((argument.name for argument in schema), given, strict=False))
    own = {argument.name for argument in schema}
    bound.update({name: value for name, value in node.kwargs.items() if name in own})
    return bound


@dataclass(frozen=True)
class Argument:
    """An argument of a node, by its name or index; its value may change while the graph is rewritten.

    Args:
        reader: the node.
        place: the name in the schema of the node's operator, or an index if the operator has no schema.
    """

    reader: Node
    place: str | int

    @property
    def value(self) -> Any:
        """The current value of the argument: a node or a Python value."""
        return bind(self.reader)[self.place] if isinstance(self.place, str) else self.reader.args[self.place]
