"""Reads KV ranges from a mask's visibility: for each query, a lower and an upper bound on the keys that it sees.

A condition ``key >= f(query)`` or ``key <= f(query)`` is a half-line of keys.  A conjunction of half-lines is the
interval between the largest lower and the smallest upper bound; a disjunction of half-lines in the same direction is
the half-line of the farther bound, as in a causal mask with a prefix that every query sees.  A condition without the
key, such as ``head < 4``, chooses between two intervals.  Instead of a key's position, the conditions may compare a
number of the key with a number of the query.

If a condition depends on the head, so do all bounds: these are kv ranges by head (`BetweenByHead`).
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
from ..index_expr import Branch, NotRecognised, Value, assume, conditions_of, conjuncts_of
from ..token_data import Load, Loads
from ..token_vectors import Calculator, Numbers, clamped, computable

aten, prims = torch.ops.aten, torch.ops.prims

POSITIONS = 2**30
"""More tokens than a sequence has; constants that are added to a bound are smaller, too."""
FAR = 2 * POSITIONS - 1
"""Numbers beyond +-`FAR` are farther than any position, whatever constant is added to them.

It fits into int32: where a bound is computed from positions alone, Inductor clamps it in the type of an index, and
Triton 3.9 refuses constants that do not fit into that.
"""

LIMIT = 2**40
"""Data beyond +-`LIMIT` can be replaced by it in a sum with numbers up to `FAR`, which stays beyond +-`FAR`."""
MOST_CHOICES = 6
"""The maximum number of conditions without a key in a mask that is read as intervals."""


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
        near = clamped(self.numbers.compute(calculator), -FAR, FAR, calculator)
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


@dataclass(frozen=True)
class Choice:
    """A bound for each query that is one of two others, as a condition on the query and the head decides.

    Args:
        cond: numbers; `then` applies where they are at least 0.
        then, other: the bounds; None for no bound.
        none: the bound that excludes nothing.
    """

    cond: Numbers
    then: AnyBound | None
    other: AnyBound | None
    none: int

    @property
    def loads(self) -> list[Load]:
        bounds = (bound for bound in (self.then, self.other) if bound is not None)
        return [*(load for _, load in self.cond.loads), *(load for bound in bounds for load in bound.loads)]

    def renamed(self, node: Callable[[Node], Node]) -> Choice:
        """Return this bound with each node n that it reads replaced by ``node(n)``."""
        then, other = (None if bound is None else bound.renamed(node) for bound in (self.then, self.other))
        return replace(self, cond=self.cond.renamed(node), then=then, other=other)

    def compute(self, calculator: Calculator) -> Any:
        """Return the bound of each query, int64."""
        holds = calculator.call(aten.ge.Scalar, self.cond.compute(calculator), 0)
        then, other = (None if bound is None else bound.compute(calculator) for bound in (self.then, self.other))
        if then is None:
            return calculator.call(aten.where.ScalarSelf, holds, self.none, other)
        if other is None:
            return calculator.call(aten.where.ScalarOther, holds, then, self.none)
        return calculator.call(aten.where.self, holds, then, other)


AnyBound = Bound | Extreme | Choice


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
        return replace(self, lo=lo, hi=hi, number=number)

    def compute(self, calculator: Calculator) -> dict[str, Any]:
        """Return the interval's operands by field ("lo", "hi", "number"), except those in `same`.

        Bounds on positions are int32; if keys have numbers, all operands are int64.
        """
        bounds = {"lo": self.lo, "hi": self.hi}
        found = {name: bound.compute(calculator) for name, bound in bounds.items() if bound is not None}
        if self.number is None:
            return {name: _in_words(bound, calculator) for name, bound in found.items()}
        return found if self.is_one_vector else found | {"number": self.number.compute(calculator)}


class BetweenByHead(Between):
    """KV ranges that differ between heads: bounds on the positions of keys, for each batch element, head and query."""

    NAME = "head_interval"

    def compute(self, calculator: Calculator) -> dict[str, Any]:
        """Return the operands by field ("lo", "hi"): int32 [batch or 1, heads or 1, q_len or 1, 1].

        Leading dimensions of size 1 may be missing.
        """
        found = super().compute(calculator)
        return {name: calculator.call(aten.unsqueeze.default, bound, -1) for name, bound in found.items()}


def _in_words(bound: Any, calculator: Calculator) -> Any:
    """Return a bound on positions as int32, clamped to just before or beyond all positions."""
    near = clamped(bound, -1, POSITIONS, calculator)
    return calculator.call(prims.convert_element_type.default, near, torch.int32)


def split(
    scores: Scores, visible: Value, loads: Loads, of_data: bool, of_positions: bool
) -> tuple[Value, Between | None]:
    """Split the visibility of a mask into a KV range for each query and the remaining condition; return (rest, range).

    A query sees a key if both show it.  The result is (visible, None) if no range is found, or the mask depends neither
    on data nor, with `of_positions`, on positions in another way than a band.
    """
    if not (of_data or of_positions):
        return visible, None
    conditions = conditions_of(visible)
    by_head = any(scores.h in scores.algebra.moved_by(cond) for cond in conditions)
    reader = _Reader(scores, loads, scores.h if by_head else None, of_positions)
    if not of_positions and not any(reader.has_interval(cond) for cond in conditions):
        return visible, None
    try:
        conjuncts, tree = conjuncts_of(visible, conditions)
        of_conjuncts = {cond: reader.half_line(cond, of_data=True) or reader.of_rows(cond) for cond in conjuncts}
        intervals = [found for found in of_conjuncts.values() if found is not None]
        rest = [cond for cond, found in of_conjuncts.items() if found is None]
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
        if by_head:
            between = BetweenByHead(between.lo, between.hi, between.number)
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
    """Reads conditions ``>= 0`` as half-lines of keys.

    Args:
        head: the index symbol of the head, if bounds differ between heads; else None.
        of_positions: whether all conditions are read that are no edges of a band, not only those with data.
    """

    scores: Scores
    loads: Loads
    head: sympy.Expr | None
    of_positions: bool

    def has_interval(self, cond: sympy.Expr) -> bool:
        """Return whether a condition compares a key's position with data of the query, or a number of the key."""
        return any(self.half_line(side, of_data=True) is not None for side in (cond, sympy.expand(-cond - 1)))

    def half_line(self, cond: sympy.Expr, of_data: bool = False) -> Between | None:
        """Return a condition as a half-line of keys; None if it is not one.

        Args:
            cond: the condition ``cond >= 0``.
            of_data: whether to accept only comparisons of a key with data of the query, the batch element or the key,
                or, with `of_positions`, those that are no edge of a band.
        """
        algebra, kv = self.scores.algebra, self.scores.kv
        if any(algebra.equality(symbol) is not None for symbol in cond.free_symbols):
            return None
        if kv.is_Symbol and kv in cond.free_symbols:
            sign = cond.coeff(kv)
            rest = sympy.expand(cond - sign * kv)
            if sign not in (1, -1) or kv in algebra.moved_by(rest) or (of_data and self._is_edge(rest, sign)):
                return None
            bound = self._bound(sympy.expand(-sign * rest))
            return None if bound is None else Between(*((bound, None) if sign == 1 else (None, bound)))
        return self._of_numbers(cond) if of_data and self.head is None else None

    def _is_edge(self, rest: sympy.Expr, sign: sympy.Expr) -> bool:
        """Return whether a comparison of a key, ``rest + sign * kv >= 0``, is left to the band."""
        algebra = self.scores.algebra
        if algebra.has_data(rest):
            return False
        return not self.of_positions or not algebra.moved_by(sympy.expand(rest + sign * self.scores.q))

    def _bound(self, expr: sympy.Expr) -> Bound | None:
        more, rest = expr.as_coeff_Add()
        numbers = self._numbers(rest) if abs(int(more)) < POSITIONS else None
        return None if numbers is None else Bound(numbers, int(more))

    def _is_sum_with_data(self, expr: sympy.Expr) -> bool:
        """Return whether `expr` is an element of data, or its negation, and a rest that is no larger than positions."""
        data = [symbol for symbol in expr.free_symbols if self.scores.algebra.is_data(symbol)]
        if len(data) != 1 or expr.coeff(data[0]) not in (1, -1):
            return False
        rest = sympy.expand(expr - expr.coeff(data[0]) * data[0])
        low, high = self.scores.algebra.lower(rest), self.scores.algebra.upper(rest)
        near = low is not None and high is not None and bool(low >= -FAR) and bool(high <= FAR)
        return near and not self.scores.algebra.has_data(rest) and self._computable(rest, self.scores.q)

    def _numbers(self, expr: sympy.Expr) -> Numbers | None:
        """Return the values of an expression for all queries; None if they may overflow.

        Those beyond +-`FAR` may be other numbers of the same sign beyond it.
        """
        found = Numbers(expr, "q", self.scores.q, self.loads.named_in(expr), self.head)
        if self._computable(expr, self.scores.q):
            return found
        return replace(found, limit=LIMIT) if self._is_sum_with_data(expr) else None

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
        return computable(expr, position, self.scores.sizes, self.scores.algebra, self.head)

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
        free = [cond for cond in conditions_of(tree) if self.scores.kv not in self.scores.algebra.moved_by(cond)]
        if len(free) > MOST_CHOICES:
            return None
        if free:
            sides = (self._solve(assume(tree, free[0], truth)) for truth in (True, False))
            return self._chosen(free[0], *sides)
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

    def of_rows(self, cond: sympy.Expr) -> Between | None:
        """Return the interval of all keys where ``cond >= 0`` and of none elsewhere, None for other conditions.

        The condition depends on the head, and not on the key.
        """
        moved_by = self.scores.algebra.moved_by(cond)
        if self.head not in moved_by or self.scores.kv in moved_by:
            return None
        found = self._chosen(cond, True, False)
        return found if isinstance(found, Between) else None

    def _chosen(
        self, cond: sympy.Expr, then: Between | bool | None, other: Between | bool | None
    ) -> Between | bool | None:
        """Return `then` where ``cond >= 0``, a condition without the key, and `other` elsewhere; None if either is."""
        if then == other:
            return then
        numbers, zeros = self._numbers(cond), self._numbers(sympy.S.Zero)
        if then is None or other is None or numbers is None or zeros is None:
            return None
        nothing = Between(Bound(zeros, POSITIONS), None)  # begins after all keys
        one, two = (
            nothing if side is False else Between(None, None) if side is True else side for side in (then, other)
        )
        assert isinstance(one, Between)
        assert isinstance(two, Between)
        if one.number is not None or two.number is not None:
            return None
        return Between(_chosen(numbers, one.lo, two.lo, 0), _chosen(numbers, one.hi, two.hi, POSITIONS))


def _chosen(cond: Numbers, then: Any, other: Any, none: int) -> Any:
    """Return the bound that is `then` where `cond` is at least 0, and `other` elsewhere; None for no bound."""
    return then if then == other else Choice(cond, then, other, none)


def _either(a: Between, b: Between) -> Between | None:
    """Return the union of two half-lines in the same direction; None for other intervals."""
    if a.lo is None and b.lo is None:
        return Between(None, _extreme("larger", a.hi, b.hi))
    if a.hi is None and b.hi is None:
        return Between(_extreme("smaller", a.lo, b.lo), None)
    return None
