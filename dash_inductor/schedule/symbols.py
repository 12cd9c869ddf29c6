"""The symbols and functions of the schedule expressions: sympy symbols and five integer functions.

Every expression is over int32 values.  Triton divides with C semantics (truncation towards zero) and Python floors; the
two agree if no operand is negative, so `FloorDiv` and `Rem` are only ever applied to a non-negative dividend and a
positive divisor.

The functions only fold constants: sympy's own ``Min``, ``Max`` and ``floor`` would spend seconds on simplification, and
print something else than what was written.
"""

from __future__ import annotations

from typing import Any

import sympy

Expr = Any  # sympy is untyped; the alias documents intent


def _index(name: str) -> Expr:
    return sympy.Symbol(name, integer=True, nonnegative=True)


def _size(name: str) -> Expr:
    return sympy.Symbol(name, integer=True, positive=True)


WORK_ID, CTA_INDEX, PART, STEP, Q, KV = map(_index, ("work_id", "cta_index", "part", "step", "q", "kv"))
HEADS, Q_LEN, KV_LEN = map(_size, ("heads", "q_len", "kv_len"))
BLOCK_Q, BLOCK_KV, HEAD_CHUNK = map(_size, ("BLOCK_Q", "BLOCK_KV", "HEAD_CHUNK"))
LO, HI = (sympy.Symbol(name, integer=True) for name in ("lo", "hi"))


class FloorDiv(sympy.Function):  # type: ignore[misc]  # sympy is untyped
    """``a // b`` for a >= 0, b > 0."""

    nargs = 2
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, a: Expr, b: Expr) -> Expr | None:
        if b == 1:
            return a
        return sympy.Integer(int(a) // int(b)) if a.is_Integer and b.is_Integer else None


class Rem(sympy.Function):  # type: ignore[misc]  # sympy is untyped
    """``a % b`` for a >= 0, b > 0."""

    nargs = 2
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, a: Expr, b: Expr) -> Expr | None:
        if b == 1:
            return sympy.Integer(0)
        return sympy.Integer(int(a) % int(b)) if a.is_Integer and b.is_Integer else None


class Where(sympy.Function):  # type: ignore[misc]  # sympy is untyped
    """``a if condition else b``; both branches are evaluated on a GPU, so both must be free of division by zero."""

    nargs = 3
    is_integer = True

    @classmethod
    def eval(cls, condition: Expr, a: Expr, b: Expr) -> Expr | None:
        if condition in (sympy.true, sympy.false):
            return a if condition == sympy.true else b
        return a if a == b else None


class Maximum(sympy.Function):  # type: ignore[misc]  # sympy is untyped
    """The larger of two values."""

    nargs = 2
    is_integer = True

    @classmethod
    def eval(cls, a: Expr, b: Expr) -> Expr | None:
        if a == b:
            return a
        return sympy.Integer(max(int(a), int(b))) if a.is_Integer and b.is_Integer else None


class Minimum(sympy.Function):  # type: ignore[misc]  # sympy is untyped
    """The smaller of two values."""

    nargs = 2
    is_integer = True

    @classmethod
    def eval(cls, a: Expr, b: Expr) -> Expr | None:
        if a == b:
            return a
        return sympy.Integer(min(int(a), int(b))) if a.is_Integer and b.is_Integer else None


def ceil_div(a: Expr, b: Expr) -> Expr:
    """``ceil(a / b)`` for a >= 0, b > 0."""
    return FloorDiv(a + b - 1, b)


def at_least_zero(x: Expr) -> Expr:
    """Return ``max(0, x)``."""
    return Maximum(0, x)
