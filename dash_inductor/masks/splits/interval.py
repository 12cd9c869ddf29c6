"""Reads KV ranges from a mask's visibility: for each query, a lower and an upper bound on the keys that it sees.

A condition ``key >= f(query)`` or ``key <= f(query)`` is a half-line of keys.  A conjunction of half-lines is the
interval between the largest lower and the smallest upper bound; a disjunction of half-lines in the same direction is
the half-line of the farther bound, as in a causal mask with a prefix that every query sees.  Instead of a key's
position, the conditions may compare a number of the key with a number of the query.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import sympy
import torch
from torch.fx import Node

from ..bands import Scores
from ..found import FoundComponent
from ..index_expr import Branch, NotRecognised, Value, conditions_of, conjuncts_of
from ..token_data import Load, Loads
from ..token_vectors import Calculator, Numbers, computable

aten, prims = torch.ops.aten, torch.ops.prims

POSITIONS = 2**30
"""More tokens than a sequence has; constants that are added to a bound are smaller, too."""
FAR = 2 * POSITIONS - 1
"""Numbers beyond +-`FAR` are farther than any position, whatever constant is added to them.

It fits into int32: where a bound is computed from positions alone, Inductor clamps it in the type of an index, and
Triton 3.9 refuses constants that do not fit into that.
"""


@dataclass(frozen=True)
class Bound:
    """A number per query that bounds the positions of the keys that it sees: ``numbers + more``."""

    numbers: Numbers
    more: int

    @property
    def loads(self) -> list[Load]:
        return [load for _, load in self.numbers.loads]

    def renamed(self, node: Callable[[Node], Node]) -> Bound:
        """Return this bound with each node n that it reads replaced by ``node(n)``."""
        return replace(self, numbers=self.numbers.renamed(node))

    def compute(self, calculator: Calculator) -> Any:
        """Return the bound of each query, an int64 vector; `numbers` beyond +-`FAR` are clamped."""
        near = _clamped(self.numbers.compute(calculator), -FAR, FAR, calculator)
        return calculator.call(aten.add.Tensor, near, self.more) if self.more else near


@dataclass(frozen=True)
class Extreme:
    """A bound for each query that is the larger or the smaller of two other bounds."""

    of: Literal["larger", "smaller"]
    first: AnyBound
    second: AnyBound

    @property
    def loads(self) -> list[Load]:
        return [*self.first.loads, *self.second.loads]

    def renamed(self, node: Callable[[Node], Node]) -> Extreme:
        """Return this bound with each node n that it reads replaced by ``node(n)``."""
        return replace(self, first=self.first.renamed(node), second=self.second.renamed(node))

    def compute(self, calculator: Calculator) -> Any:
        """Return, for each query, the larger or the smaller of `first` and `second`, as `of` says; an int64 vector."""
        operator = aten.maximum.default if self.of == "larger" else aten.minimum.default
        return calculator.call(operator, self.first.compute(calculator), self.second.compute(calculator))


AnyBound = Bound | Extreme


@dataclass(frozen=True)
class Between(FoundComponent):
    """KV ranges: a query sees a key only if the key lies between the two bounds of the query, inclusive.

    Args:
        lo, hi: the bounds on positions or on the keys' numbers; None for no bound.
        number: the keys' numbers; None for their positions.
    """

    NAME = "interval"

    lo: AnyBound | Numbers | None
    hi: AnyBound | Numbers | None
    number: Numbers | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(name for name in ("lo", "hi", "number") if getattr(self, name) is not None)

    @property
    def same(self) -> Mapping[str, str]:
        return {"number": "hi" if self.lo is None else "lo"} if self.is_one_vector else {}

    @property
    def loads(self) -> list[Load]:
        found: list[Load] = []
        for part in (self.lo, self.hi, self.number):
            if part is not None:
                found += [load for _, load in part.loads] if isinstance(part, Numbers) else part.loads
        return found

    @property
    def is_one_vector(self) -> bool:
        """Whether one tensor serves as bound and as number.

        Then each query has one bound, which equals the number of the key at the same position.
        """
        bound = self.lo if self.hi is None else self.hi
        both = self.lo is not None and self.hi is not None
        return self.number is not None and not both and isinstance(bound, Numbers) and bound.reads_as(self.number)

    def renamed(self, node: Callable[[Node], Node]) -> Between:
        """Return this interval with each node n that it reads replaced by ``node(n)``."""
        lo, hi, number = (None if part is None else part.renamed(node) for part in (self.lo, self.hi, self.number))
        assert number is None or isinstance(number, Numbers)
        return Between(lo, hi, number)

    def compute(self, calculator: Calculator) -> dict[str, Any]:
        """Return the interval's operands by field ("lo", "hi", "number"), except those in `same`.

        Bounds on positions are int32; if keys have numbers, all operands are int64.
        """
        bounds = {"lo": self.lo, "hi": self.hi}
        found = {name: bound.compute(calculator) for name, bound in bounds.items() if bound is not None}
        if self.number is None:
            return {name: _in_words(bound, calculator) for name, bound in found.items()}
        return found if self.is_one_vector else found | {"number": self.number.compute(calculator)}


def _in_words(bound: Any, calculator: Calculator) -> Any:
    """Return a bound on positions as int32, clamped to just before or beyond all positions."""
    near = _clamped(bound, -1, POSITIONS, calculator)
    return calculator.call(prims.convert_element_type.default, near, torch.int32)


def _clamped(vector: Any, least: int, greatest: int, calculator: Calculator) -> Any:
    return calculator.call(aten.clamp_max.default, calculator.call(aten.clamp_min.default, vector, least), greatest)


def split(scores: Scores, visible: Value, loads: Loads, of_data: bool) -> tuple[Value, Between | None]:
    """Split the visibility of a mask into a KV range for each query and the remaining condition; return (rest, range).

    A query sees a key if both show it.  The result is (visible, None) if no range is found or the mask does not depend
    on data.
    """
    if not of_data:
        return visible, None
    conditions = conditions_of(visible)
    reader = _Reader(scores, loads)
    if not any(reader.has_interval(cond) for cond in conditions):
        return visible, None
    try:
        conjuncts, tree = conjuncts_of(visible, conditions)
        intervals = [found for cond in conjuncts if (found := reader.half_line(cond, of_data=True)) is not None]
        rest = [cond for cond in conjuncts if reader.half_line(cond, of_data=True) is None]
        if tree is not True:
            found = reader.solve(tree)
            if found is None:
                return visible, None
            intervals.append(found)
        if not intervals:
            return visible, None
        between = intervals[0]
        for other in intervals[1:]:
            between = _both(between, other)
    except NotRecognised:
        return visible, None
    left: Value = True
    for cond in reversed(rest):
        left = Branch(cond, left, False)
    return left, between


def _both(a: Between, b: Between) -> Between:
    """Return the intersection of two intervals.

    Raises:
        NotRecognised: they are on different numbers of the keys.
    """
    if a.number is None and b.number is None:
        return Between(_extreme("larger", a.lo, b.lo), _extreme("smaller", a.hi, b.hi))
    one_side = (a.lo is None or b.lo is None) and (a.hi is None or b.hi is None)
    if a.number != b.number or not one_side:
        raise NotRecognised("depends_on_input", "two intervals of different numbers of the keys")
    return Between(a.lo or b.lo, a.hi or b.hi, a.number)


def _extreme(of: Literal["larger", "smaller"], a: Any, b: Any) -> Any:
    """Return the larger or the smaller of two bounds, or the only one if the other is None."""
    if a is None or b is None:
        return b if a is None else a
    return a if a == b else Extreme(of, a, b)


@dataclass(frozen=True)
class _Reader:
    """Reads conditions ``>= 0`` as half-lines of keys."""

    scores: Scores
    loads: Loads

    def has_interval(self, cond: sympy.Expr) -> bool:
        """Return whether a condition compares a key's position with data of the query, or a number of the key."""
        return any(self.half_line(side, of_data=True) is not None for side in (cond, sympy.expand(-cond - 1)))

    def half_line(self, cond: sympy.Expr, of_data: bool = False) -> Between | None:
        """Return a condition as a half-line of keys; None if it is not one.

        Args:
            cond: the condition ``cond >= 0``.
            of_data: whether to accept only comparisons of a key with data of the query, the batch element or the key.
        """
        algebra, kv = self.scores.algebra, self.scores.kv
        if any(algebra.equality(symbol) is not None for symbol in cond.free_symbols):
            return None
        if kv.is_Symbol and kv in cond.free_symbols:
            sign = cond.coeff(kv)
            rest = sympy.expand(cond - sign * kv)
            if sign not in (1, -1) or kv in algebra.moved_by(rest) or (of_data and not algebra.has_data(rest)):
                return None
            bound = self._bound(sympy.expand(-sign * rest))
            return None if bound is None else Between(*((bound, None) if sign == 1 else (None, bound)))
        return self._of_numbers(cond) if of_data else None

    def _bound(self, expr: sympy.Expr) -> Bound | None:
        more, rest = expr.as_coeff_Add()
        if abs(int(more)) >= POSITIONS or not self._computable(rest, self.scores.q):
            return None
        return Bound(Numbers(rest, "q", self.scores.q, self.loads.named_in(rest)), int(more))

    def _of_numbers(self, cond: sympy.Expr) -> Between | None:
        """Return a condition that compares a number of the key, which is data, with one of the query or its position.

        Return None for other conditions.
        """
        algebra, q, kv = self.scores.algebra, self.scores.q, self.scores.kv
        parts = sympy.Add.make_args(sympy.expand(cond))
        of_key = sympy.Add(*(part for part in parts if kv in algebra.moved_by(part)))
        of_query = sympy.Add(*(part for part in parts if kv not in algebra.moved_by(part)))
        if q in algebra.moved_by(of_key) or q not in algebra.moved_by(of_query):
            return None
        sign = -1 if of_key.could_extract_minus_sign() else 1
        number, bound = sign * of_key, sympy.expand(-sign * of_query)
        if not algebra.has_data(number):
            return None
        if not (self._computable(number, kv) and self._computable(bound, q)):
            return None
        of_query = Numbers(bound, "q", q, self.loads.named_in(bound))
        of_keys = Numbers(number, "kv", kv, self.loads.named_in(number))
        return Between(of_query, None, of_keys) if sign == 1 else Between(None, of_query, of_keys)

    def _computable(self, expr: sympy.Expr, position: sympy.Expr) -> bool:
        return computable(expr, position, self.scores.sizes, self.scores.algebra)

    def solve(self, tree: Value) -> Between | None:
        """Return the interval of keys that a decision tree shows to each query.

        The result is None if these keys are not one interval that is bounded on at least one side.

        Args:
            tree: a decision tree whose conditions are half-lines of keys, with True (seen) or False at its leaves.
        """
        found = self._solve(tree)
        return found if isinstance(found, Between) else None

    def _solve(self, tree: Value) -> Between | bool | None:
        """Return the result of `solve`, or True if all keys are seen, False if none, None if it is not an interval."""
        if not isinstance(tree, Branch):
            return bool(tree)
        here = self.half_line(tree.cond)
        beyond = self.half_line(sympy.expand(-tree.cond - 1))
        then, other = self._solve(tree.then), self._solve(tree.other)
        if here is None or beyond is None or then is None or other is None:
            return None
        if other is False:
            return here if then is True else then and _both(here, then)
        if then is False:
            return beyond if other is True else other and _both(beyond, other)
        if other is True:
            here, then, other = beyond, other, then
        return _either(here, other) if then is True and isinstance(other, Between) else None


def _either(a: Between, b: Between) -> Between | None:
    """Return the union of two half-lines in the same direction; None for other intervals."""
    if a.lo is None and b.lo is None:
        return Between(None, _extreme("larger", a.hi, b.hi))
    if a.hi is None and b.hi is None:
        return Between(_extreme("smaller", a.lo, b.lo), None)
    return None
