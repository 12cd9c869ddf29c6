"""Exact algebra on tensor elements: the value of one element as a function of its position.

A `Value` is a leaf or a decision tree of `Branch` nodes over leaves.  A leaf is a Python bool (bool tensors) or a sympy
expression (numbers) over *index symbols* (a position along a dimension: 0 <= i < extent), *size symbols* of Inductor's
shape environment and *data symbols* (an integer that is known at run time only).  Every condition of a tree has one
form, ``cond >= 0``, on integers.

Nothing here rounds or samples: `Algebra` decides a condition only where the ranges of the symbols prove it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true

from ..upstream.symbolic import FloorDiv, PythonMod

Leaf: TypeAlias = "bool | sympy.Expr"
Value: TypeAlias = "bool | sympy.Expr | Branch"

Range: TypeAlias = "tuple[sympy.Expr | None, sympy.Expr | None]"
"""The least and the greatest value; None if unknown."""

INT64_MAX = sympy.Integer(2**63 - 1)

MAX_LEAVES = 20_000
"""Limit on the leaf evaluations for one mask: far above what any band needs, reached only by other masks."""


@dataclass(frozen=True, eq=False)
class Branch:
    """An inner node of a decision tree: its value is `then` if ``cond >= 0``, else `other`."""

    cond: sympy.Expr
    then: Value
    other: Value


class NotRecognised(Exception):
    """Raised if a mask cannot be interpreted; `reason` is a `recognition.MaskReason`, `detail` describes the cause."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def same(a: Value, b: Value) -> bool:
    """Return whether two values (bools, sympy expressions or decision trees) are structurally equal.

    True and 1 are not equal.
    """
    if isinstance(a, Branch) and isinstance(b, Branch):
        return a.cond == b.cond and same(a.then, b.then) and same(a.other, b.other)
    if isinstance(a, (bool, Branch)) or isinstance(b, (bool, Branch)):
        return a is b
    return bool(a == b)


def is_number(value: Value) -> bool:
    """Return whether a value is a constant number, not a bool, an expression in symbols, or a decision tree."""
    return isinstance(value, sympy.Expr) and value.is_number


class Algebra:
    """The ranges of the symbols in a mask's elements, and the operations on values that need these ranges.

    A size is an int64 within the range that the shape environment knows, and at most its `limit` if it has one.
    """

    def __init__(self, shape_env: ShapeEnv | None) -> None:
        self._shape_env = shape_env
        self._extent: dict[sympy.Symbol, sympy.Expr] = {}
        self._data: dict[sympy.Symbol, tuple[int, int]] = {}
        self._moved_by: dict[sympy.Symbol, frozenset[sympy.Basic]] = {}
        self._apart: tuple[sympy.Expr, sympy.Expr] | None = None
        self._equalities: dict[sympy.Basic, tuple[sympy.Expr, sympy.Expr]] = {}
        self._limit: dict[sympy.Expr, sympy.Expr] = {}
        self._size_range: dict[sympy.Expr, Range] = {}
        self._bounds: dict[sympy.Expr, sympy.Expr | None] = {}
        self._guards: dict[sympy.Expr, bool] = {}
        self._leaves = 0

    # Symbols and their ranges

    def index(self, name: str, extent: sympy.Expr) -> sympy.Expr:
        """Return a symbol of this name for an index ``0 <= i < extent``; the constant 0 if the extent is 1."""
        if extent == 1:
            return sympy.S.Zero
        symbol = sympy.Symbol(name, integer=True, nonnegative=True)
        self._extent[symbol] = extent
        return symbol

    def is_index(self, symbol: sympy.Basic) -> bool:
        """Return whether a symbol is an index symbol, a position along a dimension (see `index`)."""
        return symbol in self._extent

    def data(self, low: int, high: int, moved_by: frozenset[sympy.Basic]) -> sympy.Symbol:
        """Return a new data symbol: an integer from `low` to `high` that depends on the index symbols `moved_by`."""
        symbol = sympy.Symbol(f"data:{len(self._data)}", integer=True)
        self._data[symbol] = low, high
        self._moved_by[symbol] = moved_by
        return symbol

    def tell_apart(self, first: sympy.Expr, second: sympy.Expr) -> None:
        """Tell this algebra which index is of queries and which of keys, so that `equal_zero` can recognise equal ids.

        Where it compares a value of the first index with one of the second, `equal_zero` then uses a data symbol, whose
        two values `equality` returns.  A difference of two positions stays an expression.

        Args:
            first, second: the index symbols of queries and of keys.
        """
        self._apart = first, second

    def equality(self, symbol: sympy.Basic) -> tuple[sympy.Expr, sympy.Expr] | None:
        """Return the two values whose equality a data symbol of `equal_zero` stands for; None for other symbols.

        Each depends on one of the two index symbols of `tell_apart`.  The data symbol is 1 where they are equal and 0
        elsewhere.
        """
        return self._equalities.get(symbol)

    def is_data(self, symbol: sympy.Basic) -> bool:
        """Return whether a symbol is a data symbol, an integer that is known at run time only (see `data`)."""
        return symbol in self._data

    def has_data(self, expr: sympy.Expr) -> bool:
        """Return whether `expr` contains a data symbol, an integer that is known at run time only (see `data`)."""
        return not self._data.keys().isdisjoint(expr.free_symbols)

    def moved_by(self, expr: sympy.Expr) -> frozenset[sympy.Basic]:
        """Return the index symbols on which `expr` depends, including through data symbols."""
        found: set[sympy.Basic] = set()
        for symbol in expr.free_symbols:
            found |= self._moved_by.get(symbol, {symbol} if symbol in self._extent else frozenset())
        return frozenset(found)

    def limit(self, size: sympy.Expr, largest: int) -> None:
        """Assume that `size` is at most `largest`; for a sum of sizes, this limits each of them."""
        terms = sympy.expand(size).as_coefficients_dict()
        lows = {m: sympy.S.One if m == 1 else self._monomial_range(m)[0] for m in terms}
        if any(low is None or (m != 1 and (low < 0 or terms[m] < 0)) for m, low in lows.items()):
            return
        least = sum((c * lows[m] for m, c in terms.items()), sympy.S.Zero)
        for m, c in terms.items():
            if m != 1:
                self._limit[m] = sympy.floor((largest - least) / c + lows[m])
        self._size_range.clear()
        self._bounds.clear()

    def lower(self, expr: sympy.Expr) -> sympy.Expr | None:
        """Return a proved lower bound of `expr`, or None if there is none.  It is exact for linear expressions."""
        if expr.is_number:
            return expr
        if expr not in self._bounds:
            self._bounds[expr] = self._lower(expr)
        return self._bounds[expr]

    def upper(self, expr: sympy.Expr) -> sympy.Expr | None:
        """Return a proved upper bound of `expr`, or None if there is none."""
        low = self.lower(-expr)
        return None if low is None else -low

    def nonnegative(self, expr: sympy.Expr) -> bool:
        """Return whether ``expr >= 0`` is proved, by ranges or by shape guards (such as ``kv_len >= q_len``)."""
        low = self.lower(expr)
        return (low is not None and low >= 0) or (not expr.is_number and self._guarded(expr))

    def _guarded(self, expr: sympy.Expr) -> bool:
        if expr not in self._guards:
            known = self._shape_env is not None and not self.has_data(expr)
            extreme = self._at_extreme(sympy.expand(expr)) if known else None
            self._guards[expr] = bool(extreme is not None and extreme.is_integer) and statically_known_true(
                cast(ShapeEnv, self._shape_env).create_symintnode(extreme, hint=None) >= 0
            )
        return self._guards[expr]

    def _lower(self, expr: sympy.Expr) -> sympy.Expr | None:
        extreme = self._at_extreme(sympy.expand(expr))
        if extreme is None:
            return None
        total = sympy.S.Zero
        for monomial, coefficient in extreme.as_coefficients_dict().items():
            low, high = self._monomial_range(monomial)
            bound = low if coefficient > 0 else high
            if bound is None:
                return None
            total += coefficient * bound
        return total

    def _at_extreme(self, expr: sympy.Expr) -> sympy.Expr | None:
        """Return a lower bound of `expr` in sizes alone; None if unknown.

        Each term has its index symbols at that end of their ranges at which it is smallest.
        """
        total = sympy.S.Zero
        for term, coefficient in expr.as_coefficients_dict().items():
            if not coefficient.is_rational:
                return None
            sizes, last = sympy.S.One, sympy.S.One
            moves = False
            for factor, power in term.as_powers_dict().items():
                extent = self._extent_of(factor)
                if extent is not None and power.is_Integer and power > 0:
                    last *= (extent - 1) ** power
                    moves = True
                elif any(s in self._extent for s in factor.free_symbols):
                    quotient = self._quotient_range(factor) if term == factor else None
                    if quotient is None:
                        return None
                    sizes *= quotient[0 if coefficient > 0 else 1]
                else:
                    sizes *= factor**power
            if moves:
                low, high = self._monomial_range(sizes)
                if low is not None and low >= 0:
                    falling = coefficient < 0
                elif high is not None and high <= 0:
                    falling = coefficient > 0
                else:
                    return None
                sizes = sizes * last if falling else sympy.S.Zero
            total += coefficient * sizes
        return sympy.expand(total)

    def _extent_of(self, factor: sympy.Expr) -> sympy.Expr | None:
        """Return the extent of an index symbol, or of a remainder of positions; None for anything else."""
        if isinstance(factor, PythonMod) and any(s in self._extent for s in factor.free_symbols):
            return factor.args[1]
        return self._extent.get(factor)

    def _quotient_range(self, expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
        """Return the bounds of a `FloorDiv` by a positive number; None for anything else."""
        if not isinstance(expr, FloorDiv) or not (expr.divisor.is_Integer and expr.divisor > 0):
            return None
        low, high = self.lower(expr.base), self.upper(expr.base)
        return None if low is None or high is None else (low // expr.divisor, high // expr.divisor)

    def _monomial_range(self, monomial: sympy.Expr) -> Range:
        """Return the bounds of a product of sizes and data."""
        low: sympy.Expr | None = sympy.S.One
        high: sympy.Expr | None = sympy.S.One
        factors = sympy.Mul.make_args(monomial)
        for factor in factors:
            flow, fhigh = self._range_of_size(factor)
            if len(factors) > 1 and (flow is None or flow < 0):
                return None, None
            low = None if low is None or flow is None else low * flow
            high = None if high is None or fhigh is None else high * fhigh
        limit = self._limit.get(monomial)
        return low, limit if limit is not None and (high is None or limit < high) else high

    def _range_of_size(self, expr: sympy.Expr) -> Range:
        """Return the bounds of a size or a data symbol."""
        if expr.is_number:
            return expr, expr
        if expr in self._data:
            least, greatest = self._data[expr]
            return sympy.Integer(least), sympy.Integer(greatest)
        if self.has_data(expr):
            return None, None
        if expr not in self._size_range:
            low, high = (-INT64_MAX - 1, INT64_MAX) if expr.is_Symbol and expr.is_integer else (None, None)
            if self._shape_env is not None and expr.is_integer:
                found = self._shape_env.bound_sympy(expr)
                low = found.lower if found.lower.is_Integer else low
                high = found.upper if found.upper.is_Integer else high
            limit = self._limit.get(expr)
            if limit is not None and (high is None or limit < high):
                high = limit
            self._size_range[expr] = low, high
        return self._size_range[expr]

    # Conditions and trees

    def at_least_zero(self, expr: sympy.Expr, strict: bool = False) -> Value:
        """Return ``expr >= 0`` (``> 0`` if `strict`) as a bool if it is proved, else as a `Branch`.

        `expr` must be an integer-valued expression plus a constant.
        """
        if expr.is_number:
            if not expr.is_comparable:
                raise NotRecognised("not_a_band", f"comparison with {expr}")
            return bool(expr > 0) if strict else bool(expr >= 0)
        expr = sympy.expand(expr)
        constant, rest = expr.as_coeff_Add()
        terms = rest.as_coefficients_dict()
        if not all(c.is_Integer for c in terms.values()) or not rest.is_integer or not constant.is_finite:
            raise NotRecognised("not_a_band", f"comparison of {expr} with zero")
        constant = sympy.ceiling(constant) - 1 if strict else sympy.floor(constant)
        gcd = math.gcd(*(int(c) for c in terms.values()))
        expr = sympy.expand(rest / gcd) + sympy.floor(constant / gcd)
        if self.nonnegative(expr):
            return True
        if self.nonnegative(-expr - 1):
            return False
        if terms[min(terms, key=str)] < 0:  # canonical form of a condition and its negation
            return Branch(-expr - 1, False, True)
        return Branch(expr, True, False)

    def equal_zero(self, expr: sympy.Expr) -> Value:
        """Return ``expr == 0`` as a bool if it is proved, else as a decision tree; see also `tell_apart`."""
        if expr.is_number:
            return bool(expr == 0)
        above, below = self.at_least_zero(expr), self.at_least_zero(-expr)
        if isinstance(above, Branch) and isinstance(below, Branch):
            sides = self._sides(sympy.expand(expr))
            if sides is not None:
                return Branch(self._equality_of(sides) - 1, True, False)
        return self.choose(above, below, False)

    def _sides(self, expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
        """Return ``expr == 0`` as the equality of a value of one of the two index symbols of `tell_apart` and one of
        the other.

        Return None if it is not one, or if both are positions, because then their difference says more.
        """
        divided = any(not self._extent.keys().isdisjoint(x.free_symbols) for x in expr.atoms(FloorDiv, PythonMod))
        if self._apart is None or not (divided or self.has_data(expr)):
            return None
        first, second = self._apart
        terms = sympy.Add.make_args(expr)
        of_first = [term for term in terms if first in self.moved_by(term)]
        one, other = sympy.Add(*of_first), -sympy.Add(*(term for term in terms if term not in of_first))
        if not of_first or second in self.moved_by(one) or second not in self.moved_by(other):
            return None
        return (-one, -other) if one.could_extract_minus_sign() else (one, other)

    def _equality_of(self, sides: tuple[sympy.Expr, sympy.Expr]) -> sympy.Symbol:
        for symbol, known in self._equalities.items():
            if known == sides:
                return symbol
        symbol = self.data(0, 1, self.moved_by(sides[0]) | self.moved_by(sides[1]))
        self._equalities[symbol] = sides
        return symbol

    def branch(self, cond: sympy.Expr, then: Value, other: Value) -> Value:
        """Return ``Branch(cond, then, other)``, or only one of its sides if that has the same value everywhere."""
        if same(then, other):
            return then
        for condition, inside, outside in ((cond, then, other), (-cond - 1, other, then)):
            point = self._only_point(condition)
            if point and same(_at(inside, point), _at(outside, point)):
                return outside
        return Branch(cond, then, other)

    def _only_point(self, cond: sympy.Expr) -> dict[sympy.Basic, sympy.Expr] | None:
        """Return the index symbols' values if ``cond >= 0`` has a single solution (cond's maximum is 0); else None."""
        if self.upper(cond) != 0:
            return None
        coefficients = sympy.expand(cond).as_coefficients_dict()
        return {s: self._extent[s] - 1 if c > 0 else sympy.S.Zero for s, c in coefficients.items() if s in self._extent}

    def lift(self, leaf_op: Callable[..., Value], *values: Value) -> Value:
        """Apply an operation on leaves to values that may be decision trees, leaf by leaf.

        ``f(if c: a else b, y)`` becomes ``if c: f(a, y) else f(b, y)``.

        Raises:
            NotRecognised: more than `MAX_LEAVES` evaluations.
        """
        for value in values:
            if isinstance(value, Branch):
                cond = value.cond
                then, other = ([assume(v, cond, truth) for v in values] for truth in (True, False))
                return self.branch(cond, self.lift(leaf_op, *then), self.lift(leaf_op, *other))
        self._leaves += 1
        if self._leaves > MAX_LEAVES:
            raise NotRecognised("not_a_band", "too many cases")
        return leaf_op(*values)

    def choose(self, condition: Value, then: Value, other: Value) -> Value:
        """Return a value that is `then` where `condition`, a bool or decision tree of bools, holds, else `other`."""
        if isinstance(condition, Branch):
            cond = condition.cond
            return self.branch(
                cond,
                self.choose(condition.then, assume(then, cond, True), assume(other, cond, True)),
                self.choose(condition.other, assume(then, cond, False), assume(other, cond, False)),
            )
        return then if condition else other

    # Division, for reshapes

    def floor_divide(self, value: sympy.Expr, divisor: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
        """Return quotient and remainder of integers, exact if the ranges allow it.

        If not, they are opaque `FloorDiv` and `PythonMod` expressions.

        Raises:
            NotRecognised: the divisor is not proved to be positive.
        """
        if not self.nonnegative(divisor - 1):
            raise NotRecognised("not_a_band", f"division of {value} by {divisor}, which is not proved to be positive")
        quotient, rest = sympy.S.Zero, sympy.S.Zero
        for term in sympy.Add.make_args(sympy.expand(value)):
            ratio = sympy.cancel(term / divisor)
            whole = ratio.is_polynomial() and all(c.is_Integer for c in ratio.as_coefficients_dict().values())
            quotient, rest = (quotient + ratio, rest) if whole else (quotient, rest + term)
        if divisor.is_Integer:  # a constant beyond the divisor moves to the quotient
            constant = rest.as_coeff_Add()[0] // divisor
            quotient, rest = quotient + constant, rest - constant * divisor
        if self.nonnegative(rest) and self.nonnegative(divisor - 1 - rest):
            return quotient, rest
        if rest.is_number and divisor.is_number:
            return quotient + rest // divisor, rest % divisor
        return quotient + FloorDiv(rest, divisor), PythonMod(rest, divisor)


def rejoined(expr: sympy.Expr) -> sympy.Expr:
    """Simplify ``n * (x // n) + x % n`` to x in an expanded expression."""
    terms = expr.as_coefficients_dict()
    for remainder in [term for term in terms if isinstance(term, PythonMod)]:
        (base, divisor), factor = remainder.args, terms[remainder]
        whole = sympy.expand(factor * divisor * FloorDiv(base, divisor))
        if all(terms.get(term, 0) == count for term, count in whole.as_coefficients_dict().items()):
            expr = sympy.expand(expr - whole + factor * (base - remainder))
    return expr


def assume(value: Value, cond: sympy.Expr, truth: bool) -> Value:
    """Return a decision tree without the branches that can be decided once ``cond >= 0`` is known to be `truth`."""
    if not isinstance(value, Branch):
        return value
    known = cond if truth else -cond - 1
    weaker, contrary = value.cond - known, -value.cond - 1 - known
    if weaker.is_number and weaker >= 0:
        return assume(value.then, cond, truth)
    if contrary.is_number and contrary >= 0:
        return assume(value.other, cond, truth)
    then, other = assume(value.then, cond, truth), assume(value.other, cond, truth)
    return value if then is value.then and other is value.other else Branch(value.cond, then, other)


def _at(value: Value, point: dict[Any, Any]) -> Value:
    """Return `value` with index symbols replaced by numbers or sizes."""
    if isinstance(value, Branch):
        cond = sympy.expand(value.cond.xreplace(point))
        if cond.is_number:
            return _at(value.then if cond >= 0 else value.other, point)
        return Branch(cond, _at(value.then, point), _at(value.other, point))
    return value if isinstance(value, bool) else sympy.expand(value.xreplace(point))


def leaves(value: Value) -> Sequence[Leaf]:
    """Return the leaves of a value, which may be a decision tree, from left to right."""
    if isinstance(value, Branch):
        return [*leaves(value.then), *leaves(value.other)]
    return [value]


def conditions_of(value: Value) -> list[sympy.Expr]:
    """Return the conditions of a decision tree (expressions tested for ``>= 0``), each once, from the outermost on."""
    if not isinstance(value, Branch):
        return []
    return list(dict.fromkeys([value.cond, *conditions_of(value.then), *conditions_of(value.other)]))


def conjuncts_of(visible: Value, conditions: Sequence[sympy.Expr]) -> tuple[list[sympy.Expr], Value]:
    """Split `visible` into a conjunction of conditions and a rest; return both.

    Args:
        visible: a decision tree of bools.
        conditions: the candidates, each an expression tested for ``>= 0``.

    Returns:
        The candidates, or their negations, that hold wherever `visible` does, each as an expression that is ``>= 0``,
        and `visible` simplified under all of them.
    """
    found = []
    for cond in conditions:
        for holds, truth in ((cond, True), (-cond - 1, False)):
            if isinstance(visible, Branch) and not any(leaves(assume(visible, cond, not truth))):
                visible = assume(visible, cond, truth)
                found.append(sympy.expand(holds))
                break
    return found, visible
