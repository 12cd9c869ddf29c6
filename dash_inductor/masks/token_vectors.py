"""Vectors with one value per token, [batch, tokens], as nodes of a graph or, for verification, real tensors.

A dimension along which a vector does not vary may have size 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import sympy
import torch
from torch.fx import Node

from ..upstream.symbolic import FloorDiv, PythonMod
from .index_expr import INT64_MAX, Algebra
from .nodes import meta_of
from .token_data import Axis, Load

aten, prims = torch.ops.aten, torch.ops.prims


class Calculator(Protocol):
    """The interface by which operands of masks are computed, on real tensors or by adding nodes to a graph.

    Values are tensors in the first case, and nodes in the second.
    """

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call of an ATen or prims operator, a tensor or a new node."""

    def tensor(self, node: Node) -> Any:
        """Return what stands for a graph node that the mask reads: its real tensor, or the node itself."""

    def positions(self, axis: Axis) -> Any:
        """Return 0, 1, ... for all queries or all keys, int64 [1, tokens]."""

    def size(self, symbol: sympy.Symbol) -> Any:
        """Return the value of a size symbol, such as a dynamic length: a number or a node."""


PLANE: tuple[Axis, ...] = ("b", "h", "q", "kv")
"""The dimensions of a dense mask."""


def values_of(load: Load, axes: Sequence[Axis], calculator: Calculator) -> Any:
    """Return all elements that a load reads, a tensor or node with the dimensions `axes`.

    Dimensions on which the load does not depend have size 1.
    """
    values, found = calculator.tensor(load.node), list[Axis]()
    for d, index in reversed(list(enumerate(load.indices))):
        if index.axis is None:
            values = calculator.call(aten.select.int, values, d, index.start)
            continue
        if index.extent is not None:
            values = calculator.call(aten.slice.Tensor, values, d, index.start, index.start + index.extent)
        found.insert(0, index.axis)
    order = [found.index(axis) for axis in axes if axis in found]
    if order != sorted(order):
        values = calculator.call(aten.permute.default, values, order)
    for d, axis in enumerate(axes):
        if axis not in found:
            values = calculator.call(aten.unsqueeze.default, values, d)
    return values


@dataclass(frozen=True)
class Numbers:
    """An integer for every query or every key, as an expression in its position and in data.

    Args:
        expr: an expression in data symbols, `position` and size symbols.
        axis: "q" or "kv".
        position: the index symbol of the axis.
        loads: the loads that the data symbols stand for.
        head: the index symbol of the head, if the numbers differ between heads; else None.
        limit: data beyond ``+-limit`` are clamped, so that sums do not overflow; None to take them as they are.
    """

    expr: sympy.Expr
    axis: Axis
    position: sympy.Expr
    loads: tuple[tuple[sympy.Symbol, Load], ...]
    head: sympy.Expr | None = None
    limit: int | None = None

    def renamed(self, node: Callable[[Node], Node]) -> Numbers:
        """Return these numbers with each node n that they read replaced by ``node(n)``."""
        return replace(self, loads=tuple((s, replace(load, node=node(load.node))) for s, load in self.loads))

    def reads_as(self, other: Numbers) -> bool:
        """Return whether these numbers equal `other` at every index; one of the two is of queries, the other of keys.

        This holds only if there are as many queries as keys.
        """
        theirs = {load.along(self.axis): symbol for symbol, load in other.loads}
        names = {symbol: theirs.get(load) for symbol, load in self.loads} | {self.position: other.position}
        return None not in names.values() and self.expr.xreplace(names) == other.expr

    def compute(self, calculator: Calculator) -> Any:
        """Return the numbers as int64 [batch or 1, tokens or 1], or by head [batch or 1, heads or 1, tokens or 1].

        Leading dimensions of size 1 may be missing by head.
        """
        if self._is_number(self.expr):
            nothing = calculator.call(aten.mul.Tensor, calculator.positions(self.axis), 0)
            return self._plus(nothing, sympy.Add.make_args(self.expr), calculator)
        return self._of(self.expr, calculator)

    def _of(self, expr: sympy.Expr, calculator: Calculator) -> Any:
        if expr == self.position:
            return calculator.positions(self.axis)
        if expr == self.head:
            return calculator.call(aten.unsqueeze.default, calculator.positions("h"), -1)
        if expr.is_Symbol:
            load = dict(self.loads)[expr]
            axes: tuple[Axis, ...] = ("b", self.axis) if self.head is None else ("b", "h", self.axis)
            values = values_of(load, axes, calculator)
            if meta_of(load.node).dtype != torch.int64:
                return calculator.call(prims.convert_element_type.default, values, torch.int64)
            return values if self.limit is None else clamped(values, -self.limit, self.limit, calculator)
        if isinstance(expr, FloorDiv):
            base = self._of(expr.base, calculator)
            return calculator.call(aten.div.Tensor_mode, base, int(expr.divisor), rounding_mode="floor")
        if isinstance(expr, PythonMod):
            return calculator.call(aten.remainder.Scalar, self._of(expr.args[0], calculator), int(expr.args[1]))
        numbers = [part for part in expr.args if self._is_number(part)]
        first, *others = (self._of(part, calculator) for part in expr.args if part not in numbers)
        for other in others:
            first = calculator.call(aten.add.Tensor if expr.is_Add else aten.mul.Tensor, first, other)
        if expr.is_Add:
            return self._plus(first, numbers, calculator)
        for part in numbers:
            factor = int(part) if part.is_Integer else calculator.size(part)
            first = calculator.call(aten.mul.Tensor, first, factor)
        return first

    def _plus(self, tensor: Any, numbers: Sequence[sympy.Expr], calculator: Calculator) -> Any:
        for number in numbers:
            factor, size = number.as_coeff_Mul()
            if size == 1:
                tensor = calculator.call(aten.add.Tensor, tensor, int(factor))
            else:
                tensor = calculator.call(aten.add.Tensor, tensor, calculator.size(size), alpha=int(factor))
        return tensor

    def _is_number(self, expr: sympy.Expr) -> bool:
        moving = {self.position, self.head, *(symbol for symbol, _ in self.loads)}
        return bool(expr.free_symbols.isdisjoint(moving))


def clamped(values: Any, least: int, greatest: int, calculator: Calculator) -> Any:
    """Return integers, those below `least` and above `greatest` replaced by these."""
    return calculator.call(aten.clamp_max.default, calculator.call(aten.clamp_min.default, values, least), greatest)


def computable(
    expr: sympy.Expr,
    position: sympy.Expr,
    sizes: frozenset[sympy.Basic],
    algebra: Algebra,
    head: sympy.Expr | None = None,
) -> bool:
    """Return whether `Numbers` can compute an expression without overflowing int64.

    Apart from data symbols, the expression may contain only `position`, `head` and the symbols in `sizes`.
    Intermediate sums and products may wrap around, as long as dividends and the final result do not overflow.
    """

    def is_number(part: sympy.Expr) -> bool:
        return not algebra.moved_by(part) and not algebra.has_data(part)

    def is_term(number: sympy.Expr) -> bool:
        factor, size = number.as_coeff_Mul()
        return factor.is_Integer and (size == 1 or size in sizes)

    def known(part: sympy.Expr) -> bool:
        if part in (position, head) or algebra.is_data(part):
            return True
        if isinstance(part, (FloorDiv, PythonMod)):
            base, divisor = part.args
            return divisor.is_Integer and divisor > 0 and fits(base) and known(base)
        if not (part.is_Add or part.is_Mul):
            return False
        numbers = [arg for arg in part.args if is_number(arg)]
        rest = [arg for arg in part.args if arg not in numbers]
        plain = is_term if part.is_Add else (lambda number: number.is_Integer or number in sizes)
        return bool(rest) and all(map(plain, numbers)) and all(map(known, rest))

    def fits(part: sympy.Expr) -> bool:
        low, high = algebra.lower(part), algebra.upper(part)
        return low is not None and high is not None and bool(low >= -INT64_MAX - 1) and bool(high <= INT64_MAX)

    return fits(expr) and (all(map(is_term, sympy.Add.make_args(expr))) if is_number(expr) else known(expr))
