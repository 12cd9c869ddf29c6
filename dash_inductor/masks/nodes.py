"""Helpers for the nodes of a mask: their shapes and numbers, their producers, and which of them are data."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import cast

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..graph.nodes import op_name
from ..upstream.dispatch import OpOverload
from .index_expr import NotRecognised

Position = tuple[sympy.Expr, ...]
"""One index expression per dimension; also a shape."""

MAX_PRODUCERS = 400
"""The maximum number of producers of a mask that are read; real masks have about 60."""

_CREATION = "arange full full_like ones ones_like zeros zeros_like new_full new_ones new_zeros scalar_tensor"
_UNDEFINED = "empty empty_like new_empty empty_strided new_empty_strided empty_permuted"
CREATION = frozenset({"prims::iota"} | {f"aten::{name}" for name in f"{_CREATION} {_UNDEFINED}".split()})
"""Operators whose result depends on the shape and dtype of their tensor arguments, but not on their values."""


def is_size(node: Node) -> bool:
    """Return whether the node is a number (a size, or arithmetic on sizes), not a tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def as_expr(value: object) -> sympy.Expr:
    """Return a Python number, SymInt, or number-valued node as an exact sympy number or expression in size symbols.

    Raises:
        NotRecognised: "unknown_op" for anything else.
    """
    if isinstance(value, Node):
        if not is_size(value):
            raise NotRecognised("unknown_op", f"{value.name} is used as a number")
        value = value.meta["val"]
    if isinstance(value, torch.SymInt):
        return value.node.expr
    if isinstance(value, (bool, int)):
        return sympy.Integer(int(value))
    if isinstance(value, float):
        if math.isnan(value):
            return sympy.nan
        return sympy.oo * (1 if value > 0 else -1) if math.isinf(value) else sympy.Rational(value)
    raise NotRecognised("unknown_op", f"argument {value!r} of type {type(value).__name__}")


def meta_of(node: Node) -> torch.Tensor:
    """Return the node's fake tensor (shape and dtype).

    Raises:
        NotRecognised: "unknown_op" if it has none.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise NotRecognised("unknown_op", f"{node.name} ({node.target}) has no tensor value")
    return value


def shape_of(node: Node) -> Position:
    """Return the shape of a node's tensor, as expressions in size symbols."""
    return tuple(as_expr(n) for n in meta_of(node).shape)


def shape_env_of(nodes: list[Node]) -> ShapeEnv | None:
    """Return the shape environment of the size symbols in the nodes' shapes; None if all sizes are static."""
    for node in nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                return cast(ShapeEnv, size.node.shape_env)
    return None


def rule_name(node: Node) -> str:
    """Return the key of a node's rule in the mask reader: the name of its operator, or the FX opcode of other nodes."""
    return op_name(node) if node.op == "call_function" else node.op


def is_unknown(node: Node, readable: Container[str]) -> bool:
    """Return whether a tensor is unknown at compile time: an input of the graph, or the result of an operator without a
    rule, such as random numbers.

    Args:
        node: the node of the tensor.
        readable: the names of rules, see `rule_name`.
    """
    return node.op == "placeholder" or rule_name(node) not in readable


def is_data(node: Node, readable: Container[str], known: dict[Node, bool]) -> bool:
    """Return whether `node` depends on values that are unknown at compile time, see `is_unknown`.

    `known` caches the answers.
    """
    stack = [node]
    while stack:
        current = stack[-1]
        if current in known:
            stack.pop()
        elif is_size(current):
            known[current] = False
        elif is_unknown(current, readable):
            known[current] = True
        else:
            sources = _tensors_read(current)
            unknown = [n for n in sources if n not in known]
            stack += unknown
            if not unknown:
                known[current] = any(known[n] for n in sources)
    return known[node]


def inputs_of(node: Node) -> list[Node]:
    """Return the tensor inputs of the graph on whose values `node` depends, in graph order."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen.add(current)
            stack += _tensors_read(current)
    return sorted(found for found in seen if found.op == "placeholder" and not is_size(found))


def producers(node: Node, readable: Container[str]) -> list[Node]:
    """Return all nodes on whose values `node` depends, tensors and numbers, each after its own inputs.

    readable: rule names (see `rule_name`).  The inputs of a node with another rule name are left out.

    Raises:
        NotRecognised: "unknown_op" for more than `MAX_PRODUCERS` nodes, and for tensors that are written in place.
    """
    order: dict[Node, None] = {}
    stack: list[tuple[Node, bool]] = [(node, False)]
    seen: set[Node] = set()
    while stack:
        current, done = stack.pop()
        if done:
            order[current] = None
            continue
        if current in seen:
            continue
        seen.add(current)
        stack.append((current, True))
        if is_size(current):  # a number is known as an expression in the graph's size symbols
            continue
        if rule_name(current) in readable:
            stack.extend((n, False) for n in current.all_input_nodes if is_size(n))
            stack.extend((n, False) for n in _tensors_read(current))
    if len(order) > MAX_PRODUCERS:
        raise NotRecognised("unknown_op", f"a chain of {len(order)} nodes is longer than {MAX_PRODUCERS}")
    for current in order:
        _require_unchanged(current)
    return list(order)


def _tensors_read(node: Node) -> list[Node]:
    """Return the tensor inputs of a node whose values it reads."""
    return [] if op_name(node) in CREATION else [n for n in node.all_input_nodes if not is_size(n)]


def _require_unchanged(node: Node) -> None:
    """Raise NotRecognised if a tensor is written in place.

    Graphs after AOTAutograd are functional; this guards against one that is not.
    """
    for user in node.users:
        if isinstance(user.target, OpOverload):
            schema = user.target._schema
            written = (
                argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
            )
            if any(value is node and write for value, write in zip(user.args, written, strict=False)):
                raise NotRecognised("unknown_op", f"{user.target} ({user.name}) writes to {node.name}")
            if any(result.alias_info is not None for result in schema.returns):
                _require_unchanged(user)
