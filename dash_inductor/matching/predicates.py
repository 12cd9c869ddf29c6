"""Which keys are valid, as a predicate of loads; and the operators that compute it, in the graph or on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from .index_expr import Branch, Value
from .mask_nodes import meta_of
from .token_data import Axis, Load

aten = torch.ops.aten

Compute = Callable[[Any, tuple[Any, ...]], Any]
"""Calls an operator on tensors, or adds the call to a graph."""
TensorOf = Callable[[Node], Any]
"""What stands for a node of the mask among the arguments: a tensor, or the node itself."""


@dataclass(frozen=True)
class Comparison:
    """Where ``load <= bound`` or, if `at_least`, ``load >= bound``; a load of truth values counts as 0 or 1."""

    load: Load
    bound: int
    at_least: bool

    @staticmethod
    def of(cond: sympy.Expr, symbol: sympy.Symbol, load: Load) -> Comparison | None:
        """The condition ``cond >= 0`` in the symbol of a load; None if that is no comparison with a number."""
        constant, rest = cond.as_coeff_Add()
        if rest not in (symbol, -symbol) or not constant.is_Integer:
            return None
        return Comparison(load, int(constant if rest == -symbol else -constant), rest == symbol)


@dataclass(frozen=True)
class Choice:
    """`then` where the comparison holds, else `other`."""

    comparison: Comparison
    then: Predicate
    other: Predicate


Predicate = bool | Choice


def predicate(tree: Value, comparison: Callable[[sympy.Expr], Comparison]) -> Predicate:
    """A decision tree of truth values whose conditions are comparisons of loads."""
    if isinstance(tree, Branch):
        return Choice(comparison(tree.cond), predicate(tree.then, comparison), predicate(tree.other, comparison))
    assert isinstance(tree, bool)
    return tree


def comparisons(found: Predicate) -> Iterator[Comparison]:
    """All comparisons of a predicate."""
    if isinstance(found, Choice):
        yield found.comparison
        yield from comparisons(found.then)
        yield from comparisons(found.other)


def compute(found: Choice, token: Axis, call: Compute, tensor: TensorOf) -> Any:
    """The predicate as a bool tensor [batch, tokens]; a dimension along which it does not change has size 1."""
    here = _compared(found.comparison, token, call, tensor)
    then, other = (
        part if isinstance(part, bool) else compute(part, token, call, tensor) for part in (found.then, found.other)
    )
    if then is True and other is False:
        return here
    if other is False:
        return call(aten.bitwise_and.Tensor, (here, then))
    if then is True:
        return call(aten.bitwise_or.Tensor, (here, other))
    elsewhere = call(aten.bitwise_not.default, (here,))
    if then is False:
        return elsewhere if other is True else call(aten.bitwise_and.Tensor, (elsewhere, other))
    if other is True:
        return call(aten.bitwise_or.Tensor, (elsewhere, then))
    sides = [call(aten.bitwise_and.Tensor, pair) for pair in ((here, then), (elsewhere, other))]
    return call(aten.bitwise_or.Tensor, tuple(sides))


def _compared(comparison: Comparison, token: Axis, call: Compute, tensor: TensorOf) -> Any:
    values = vector(comparison.load, token, call, tensor)
    if meta_of(comparison.load.node).dtype != torch.bool:
        return call(aten.ge.Scalar if comparison.at_least else aten.le.Scalar, (values, comparison.bound))
    return values if comparison.at_least else call(aten.bitwise_not.default, (values,))


def vector(load: Load, token: Axis, call: Compute, tensor: TensorOf) -> Any:
    """A load as a tensor [batch, tokens]; a dimension along which it does not change has size 1."""
    values, axes = tensor(load.node), list[Axis]()
    for d, place in reversed(list(enumerate(load.places))):
        if place.axis is None:
            values = call(aten.select.int, (values, d, place.start))
            continue
        if place.extent is not None:
            values = call(aten.slice.Tensor, (values, d, place.start, place.start + place.extent))
        axes.insert(0, place.axis)
    if axes == [token, "b"]:
        values = call(aten.permute.default, (values, [1, 0]))
    for d, axis in enumerate(("b", token)):
        if axis not in axes:
            values = call(aten.unsqueeze.default, (values, d))
    return values
