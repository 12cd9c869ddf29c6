"""Finds the nodes that hold query, key, value and the gradient of the output, and the nodes they are computed from."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from ...graph.nodes import op_name
from ...graph.numbers import holds_all
from ...graph.sizes import static
from .known import Known
from .labels import CAST, Atom, Dimension, Labels, is_float, shape_of
from .scores import constant_factor
from .value import Operand, Value


def operand(values: Known, kind: Operand, node: object, labels: Labels) -> None:
    """Record that a product's operand holds query, key, value or G, the gradient of the output.

    Every node from which it is computed by views, widening casts and constant factors is recorded too.

    Args:
        values: what is known of the attention; extended.
        kind: which of the four.
        node: the operand.
        labels: for each of its dimensions, the atoms (index ranges) that it merges.
    """
    assert isinstance(node, Node)
    factor, chain = 1.0, []
    while True:
        chain.append((node, labels, factor))
        found = _before(values, kind, node, labels)
        if found is None:
            break
        node, labels, times = found
        factor *= times
    values.chains[kind] = [part for part, _, _ in reversed(chain)]
    for part, own, after in reversed(chain):  # only the factors before a node count
        values.set_operand(part, Value(kind, own, factor / after))


def _before(values: Known, kind: Operand, node: Node, labels: Labels) -> tuple[Node, Labels, float] | None:
    source = node.args[0] if node.op == "call_function" and node.args else None
    if op_name(node) == CAST and is_float(source) and not _widens(source, node):
        return None
    back = values.atoms.back(node, labels) if node.op == "call_function" else None
    if back is not None and is_float(source):
        return source, back, 1.0  # type: ignore[return-value]
    factor = constant_factor(node) if kind in ("Q", "K") else None
    return None if factor is None or not factor[1] else (factor[0], labels, factor[1])


def name_operand(values: Known, kind: Operand, node: Node) -> None:
    """Record that a node holds query, key, value or G if it is a view, cast or constant multiple of a node that does.

    Args:
        values: what is known of the attention; extended.
        kind: which of the four.
        node: the node.
    """
    named = values.named[kind]
    if node in named or (op_name(node) == CAST and not _keeps_operands(values, node)):
        return
    first = named.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    labels = None if first is None else values.atoms.through(node, first.labels)
    factor = constant_factor(node)
    if first is not None and labels is not None:
        values.set_operand(node, replace(first, labels=labels))
    elif factor is not None and factor[0] in named:
        value = named[factor[0]]
        values.set_operand(node, replace(value, factor=value.factor * factor[1]))


def _keeps_operands(values: Known, node: Node) -> bool:
    """Return whether a conversion of an operand loses no precision that the kernels have."""
    own = values.dtype
    return own is not None and is_float(node) and holds_all(node.meta["val"].dtype, own)


def new_dimension(node: object, dim: int) -> Dimension:
    """Return a new label for dimension `dim` of a node's tensor: one new `Atom` (an index range), or () for size 1."""
    assert isinstance(node, Node)
    size = shape_of(node)[dim]
    return () if static(size) == 1 else (Atom(size),)


def _widens(source: object, node: Node) -> bool:
    """Return whether a cast loses no precision that the kernels have, so that its source may be read instead."""
    assert isinstance(source, Node)
    old, new = source.meta["val"].dtype, node.meta["val"].dtype
    return bool(old == new or (old.itemsize < new.itemsize and new != torch.float64))
