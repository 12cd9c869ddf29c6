"""Predicates on the data that a mask reads: they decide which keys are valid, or which queries see which keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from .index_expr import Branch, Value
from .nodes import meta_of
from .token_data import Axis, Load
from .token_vectors import Calculator, values_of

aten = torch.ops.aten


@dataclass(frozen=True)
class LoadComparison:
    """The condition ``load <= bound`` (``load >= bound`` if `at_least`) on a load, which is an element of a tensor.

    A boolean load counts as 0 or 1.
    """

    load: Load
    bound: int
    at_least: bool

    @staticmethod
    def of(cond: sympy.Expr, symbol: sympy.Symbol, load: Load) -> LoadComparison | None:
        """Return the condition ``cond >= 0`` as a comparison of a load, for which `symbol` stands, with a constant.

        Return None if it is not one.
        """
        constant, rest = cond.as_coeff_Add()
        if rest not in (symbol, -symbol) or not constant.is_Integer:
            return None
        return LoadComparison(load, int(constant if rest == -symbol else -constant), rest == symbol)


@dataclass(frozen=True)
class Conditional:
    """A predicate: `then` where the comparison holds, else `other`."""

    comparison: LoadComparison
    then: Predicate
    other: Predicate


Predicate = bool | Conditional


def predicate(tree: Value, comparison: Callable[[sympy.Expr], LoadComparison]) -> Predicate:
    """Convert a decision tree with boolean leaves to a predicate; `comparison` converts each of its conditions."""
    if isinstance(tree, Branch):
        return Conditional(comparison(tree.cond), predicate(tree.then, comparison), predicate(tree.other, comparison))
    assert isinstance(tree, bool)
    return tree


def comparisons(found: Predicate) -> Iterator[LoadComparison]:
    """Yield all comparisons of a predicate."""
    if isinstance(found, Conditional):
        yield found.comparison
        yield from comparisons(found.then)
        yield from comparisons(found.other)


def of_loads(found: Conditional, change: Callable[[Load], Load]) -> Conditional:
    """Return the predicate `found` with each of its loads replaced by ``change(load)``."""

    def part(found: Predicate) -> Predicate:
        return found if isinstance(found, bool) else of_loads(found, change)

    comparison = replace(found.comparison, load=change(found.comparison.load))
    return Conditional(comparison, part(found.then), part(found.other))


def compute(found: Conditional, axes: Sequence[Axis], calculator: Calculator) -> Any:
    """Return the values of a predicate at all positions along some axes of the scores, a bool tensor or node.

    Args:
        found: the predicate.
        axes: the dimensions of the result; those on which the predicate does not depend have size 1.
        calculator: computes on tensors, or adds nodes.
    """
    call, here = calculator.call, _compared(found.comparison, axes, calculator)
    then, other = (
        part if isinstance(part, bool) else compute(part, axes, calculator) for part in (found.then, found.other)
    )
    if then is True and other is False:
        return here
    if other is False:
        return call(aten.bitwise_and.Tensor, here, then)
    if then is True:
        return call(aten.bitwise_or.Tensor, here, other)
    elsewhere = call(aten.bitwise_not.default, here)
    if then is False:
        return elsewhere if other is True else call(aten.bitwise_and.Tensor, elsewhere, other)
    if other is True:
        return call(aten.bitwise_or.Tensor, elsewhere, then)
    sides = [call(aten.bitwise_and.Tensor, *pair) for pair in ((here, then), (elsewhere, other))]
    return call(aten.bitwise_or.Tensor, *sides)


def _compared(comparison: LoadComparison, axes: Sequence[Axis], calculator: Calculator) -> Any:
    values = values_of(comparison.load, axes, calculator)
    if meta_of(comparison.load.node).dtype != torch.bool:
        return calculator.call(aten.ge.Scalar if comparison.at_least else aten.le.Scalar, values, comparison.bound)
    return values if comparison.at_least else calculator.call(aten.bitwise_not.default, values)
