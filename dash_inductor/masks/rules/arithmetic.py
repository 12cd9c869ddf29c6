"""Rules of the mask reader for arithmetic, on numbers that are exact in the dtype in which the operator computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
from torch.fx import Node

from ..index_expr import NotRecognised, Value, rejoined
from ..nodes import Position, as_expr, meta_of
from ..reader import MaskReader, Rule
from .elementwise import LeafOp, elementwise

RULES: dict[str, Rule] = {}


def _scaled(combine: LeafOp, factor_of: int, truth: Callable[..., bool] | None = None) -> Rule:
    """Return the rule of add, sub or rsub; `factor_of` is the index of the operand that `alpha` multiplies."""

    def rule(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
        alpha, dtype = as_expr(args.get("alpha", 1)), meta_of(node).dtype

        def leaf(*operands: sympy.Expr) -> sympy.Expr:
            terms = list(operands)
            if alpha != 1:
                terms[factor_of] *= alpha
                if dtype.is_floating_point and reader.exact(terms[factor_of], dtype) != terms[factor_of]:
                    raise NotRecognised("not_a_band", f"{node.name} rounds a product before it adds")
            return rejoined(sympy.expand(combine(*terms)))

        return elementwise("self other", lambda _: leaf, truth if alpha == 1 else None)(reader, node, args, position)

    return rule


RULES["aten::add"] = _scaled(lambda a, b: a + b, 1, lambda a, b: a or b)
RULES["aten::sub"] = _scaled(lambda a, b: a - b, 1)
RULES["aten::rsub"] = _scaled(lambda a, b: b - a, 0)
RULES["aten::mul"] = elementwise("self other", lambda _: lambda a, b: sympy.expand(a * b), lambda a, b: a and b)
RULES["aten::neg"] = elementwise("self", lambda _: lambda a: -a)


def _extremum(sign: int) -> Callable[[MaskReader], LeafOp]:
    """Return the larger (sign 1) or the smaller (sign -1) of two values; NaN propagates."""

    def compute(reader: MaskReader) -> LeafOp:
        def leaf(a: sympy.Expr, b: sympy.Expr) -> Value:
            if a == b or a is sympy.nan:
                return a
            if b is sympy.nan:
                return b
            return reader.algebra.choose(reader.algebra.at_least_zero(sign * (a - b)), a, b)

        return leaf

    return compute


_maximum, _minimum = _extremum(1), _extremum(-1)

RULES["aten::minimum"] = elementwise("self other", _minimum, lambda a, b: a and b)
RULES["aten::maximum"] = elementwise("self other", _maximum, lambda a, b: a or b)
RULES["aten::clamp_min"] = elementwise("self min", _maximum)
RULES["aten::clamp_max"] = elementwise("self max", _minimum)
RULES["aten::abs"] = elementwise(
    "self", lambda reader: lambda a: reader.algebra.choose(reader.algebra.at_least_zero(a), a, -a)
)


def _clamp(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    """Return the smaller of `max` and the larger of `self` and `min`."""

    def compute(_: MaskReader) -> LeafOp:
        def leaf(x: sympy.Expr, *bounds: sympy.Expr) -> Value:
            value: Value = x
            rest = list(bounds)
            if args.get("min") is not None:
                value = reader.algebra.lift(_maximum(reader), value, rest.pop(0))
            if rest:
                value = reader.algebra.lift(_minimum(reader), value, rest[0])
            return value

        return leaf

    return elementwise("self min max", compute)(reader, node, args, position)


RULES["aten::clamp"] = _clamp


def _quotient(reader: MaskReader) -> LeafOp:
    """Return the quotient of floats by a power of 2; other divisors round, differently on different devices."""
    del reader

    def leaf(a: sympy.Expr, b: sympy.Expr) -> Value:
        if not (b.is_Rational and b != 0 and abs(b.p).bit_count() == b.q.bit_count() == 1):
            raise NotRecognised("not_a_band", f"division of {a} by {b}, which may round")
        return sympy.expand(a / b)

    return leaf


def _divided(rounding: str, remainder: bool = False) -> Rule:
    """Return the rule of integer division; for floats the division may round before the result is truncated."""

    def compute(reader: MaskReader) -> LeafOp:
        algebra = reader.algebra

        def leaf(a: sympy.Expr, b: sympy.Expr) -> Value:
            sign = -1 if algebra.nonnegative(-b - 1) else 1
            quotient, rest = algebra.floor_divide(sign * a, sign * b)
            if remainder:
                return sign * rest
            if rounding == "floor":
                return quotient
            mirrored, _ = algebra.floor_divide(-sign * a, sign * b)
            return algebra.choose(algebra.at_least_zero(sign * a), quotient, -mirrored)

        return leaf

    def rule(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
        if meta_of(node).dtype.is_floating_point:
            raise NotRecognised("not_a_band", f"{node.name} divides floats and cuts the result")
        return elementwise("self other", compute)(reader, node, args, position)

    return rule


def _div(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    rounding = args.get("rounding_mode")
    if rounding is not None:
        return _divided(rounding)(reader, node, args, position)
    # Integers become floats first.
    return elementwise("self other", _quotient, meet=lambda _, node: meta_of(node).dtype)(reader, node, args, position)


RULES["aten::div"] = _div
RULES["aten::floor_divide"] = _divided("floor")
RULES["aten::remainder"] = _divided("floor", remainder=True)
