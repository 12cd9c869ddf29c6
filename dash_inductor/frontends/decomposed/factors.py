"""Which operand of decomposed attention a factor of the scores multiplies, and the gradient of the factor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...graph.emit import Emitter
from ...graph.nodes import Argument
from ..factors import NO_FACTORS, Factors, Side
from .known import Known
from .labels import Labels
from .masks import in_four
from .places import Reader, Result
from .scores import Factor, Stuck

aten, prims = torch.ops.aten, torch.ops.prims
_KEYS_BEFORE = (0, 1, 3, 2)
"""The permutation between [batch, heads, 1, keys] and [batch, heads, keys, 1]."""


def check_factor(values: Known) -> None:
    """Check that a factor of the scores does not depend on them.

    Raises:
        Stuck: it does.
    """
    factor, product = values.scores.factor, values.scores.product
    if factor is not None and product is not None and _depends_on(factor.tensor, product, values.place):
        raise Stuck(factor.node, f"multiplies scores by {factor.tensor.name}, which is computed from them")


def factors_of(reader: Reader) -> Factors:
    """Return the factors by which query and key are multiplied; the views that this takes are temporary nodes.

    Raises:
        Stuck: the scores have a factor that can multiply neither.
    """
    factor = reader.values.scores.factor
    if factor is None:
        return NO_FACTORS
    side, tensor = _side(reader, factor), in_four(reader, factor)
    call = functools.partial(reader.temporaries.call, like=tensor)
    if factor.inverse:
        tensor = call(aten.reciprocal.default, call(prims.convert_element_type.default, tensor, torch.float32))
    if side == "query":
        return Factors(query=reader.place(tensor))
    return Factors(key=reader.place(call(aten.permute.default, tensor, list(_KEYS_BEFORE))))


def gradients_of_factor(reader: Reader) -> list[TensorFactor]:
    """Return the gradient of the factor of the scores, if the program reads it; else an empty list.

    Raises:
        Stuck: the program computes another gradient.
    """
    values, factor = reader.values, reader.values.scores.factor
    all_ = [node for node, value in values.known.items() if value.kind == "dfactor"]
    found = [node for node in all_ if not set(node.users) <= set(all_)]  # others are casts, views and partial sums
    if factor is None or not found:
        return []
    value, wanted = values.known[found[0]], values.atoms.resolved(reader.roles.of_kind("score"))
    varies = _varies(factor.own(values.atoms), wanted)
    expected = -factor.outside if factor.inverse else factor.outside
    if len(found) != 1 or abs(value.factor - expected) > 1e-5 * abs(expected):
        raise Stuck(found[0], "the gradient of a factor of the scores")
    if varies is None:
        raise Stuck(
            factor.node, f"multiplies scores by {factor.tensor.name}, whose gradient is summed over part of a dimension"
        )
    if varies != _varies(values.atoms.resolved(value.labels), wanted):
        raise Stuck(found[0], "the gradient of a factor of the scores has not the dimensions of the factor")
    side = _side(reader, factor)
    summed = tuple(place for place, dim in enumerate((0, 1, 2 if side == "query" else 3)) if not varies[dim])
    labels = tuple(dimension if own else () for dimension, own in zip(wanted, varies, strict=True))
    divisor = None
    if factor.inverse:
        tensor = in_four(reader, factor)
        if side == "key":
            tensor = reader.temporaries.call(aten.permute.default, tensor, list(_KEYS_BEFORE), like=tensor)
        divisor = reader.place(tensor)
    return [TensorFactor(side, divisor, summed, Result(found[0], value.labels, labels, values.atoms))]


def _side(reader: Reader, factor: Factor) -> Side:
    """Return whether query or key can be multiplied by a factor of the scores.

    Raises:
        Stuck: neither can be.
    """
    roles, atoms = reader.roles, reader.values.atoms
    own = {atom for dimension in factor.own(atoms) for atom in dimension}
    if own.isdisjoint(atoms.atoms(roles.keys)):
        return "query"
    by = f"multiplies scores by {factor.tensor.name}"
    if not own.isdisjoint(atoms.atoms(roles.queries)):
        raise Stuck(factor.node, f"{by}, which depends on both query and key")
    if atoms.atoms(roles.heads) != atoms.atoms(roles.kv_heads) and not own.isdisjoint(atoms.atoms(roles.heads)):
        raise Stuck(factor.node, f"{by}, which depends on head and key, and heads share keys")
    return "key"


def _depends_on(node: Node, source: Node, place: dict[Node, int]) -> bool:
    """Return whether a node is computed from another one; `place` has the index of every node in the graph."""
    stack, seen = [node], set[Node]()
    while stack:
        found = stack.pop()
        if found is source:
            return True
        if found not in seen and place.get(found, len(place)) > place[source]:
            stack += found.all_input_nodes
        seen.add(found)
    return False


def _varies(own: Labels, wanted: Labels) -> tuple[bool, ...] | None:
    """Return for each dimension of `wanted` whether a tensor with labels `own` varies along it.

    Return None if the tensor varies along a part of a dimension.
    """
    present = {atom for dimension in own for atom in dimension}
    if any(0 < len(present & set(dimension)) < len(dimension) for dimension in wanted):
        return None
    return tuple(bool(dimension) and set(dimension) <= present for dimension in wanted)


@dataclass(frozen=True)
class TensorFactor:
    """The gradient of a factor of decomposed attention; implements `FactorGradient`.

    Attributes:
        side: the tensor that the factor multiplies.
        divisor: if scores are divided by the tensor, the argument that holds it, in four dimensions that broadcast to
            [batch, heads, length, 1]; else None.
        summed: the dimensions of [batch, heads, length, 1] along which the tensor has size 1.
        result: the node that holds the gradient.
    """

    side: Side
    divisor: Argument | None
    summed: tuple[int, ...]
    result: Result

    def put(self, emitter: Emitter, rows: Node, before: Node) -> tuple[Node, Node]:
        def call(target: Callable[..., Any], *args: Any) -> Node:
            return emitter.call(target, args, before=before, like=before)

        if self.divisor is not None:
            by = call(prims.convert_element_type.default, self.divisor.value, torch.float32)
            rows = call(aten.neg.default, call(aten.div.Tensor, call(aten.div.Tensor, rows, by), by))
        if self.summed:
            rows = call(aten.sum.dim_IntList, rows, list(self.summed), True)
        if self.side == "key":
            rows = call(aten.permute.default, rows, list(_KEYS_BEFORE))
        old, new = self.result.put(emitter, rows, before)
        return old, emitter.laid_out(new, like=old)
