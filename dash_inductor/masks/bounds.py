"""Bounds of tensors that a graph computes from numbers and positions alone, such as the bias of ALiBi.

Every node gets an interval that holds all of its elements, from the intervals of its inputs.  Nothing is evaluated, so
operators that only move elements need no sizes: all elements of their results are elements of their sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..graph.nodes import bind, op_name

Interval = tuple[float, float]

MOST_NODES = 1000
"""Chains of more nodes are not followed."""

_ROUNDING = 2.0**-7
"""The relative error of an operator that rounds to bfloat16; other dtypes have smaller ones, on any device."""

_LONGEST = 2**40
"""Where the number of positions is dynamic, they are bounded as so many: more have no memory."""

_CREATED = ("prims::iota", "aten::full", "aten::scalar_tensor")


class _Unknown(Exception):
    """Raised if no bounds of a tensor's elements are known."""


def bounds(node: Node) -> Interval | None:
    """Return finite numbers between which all elements of a tensor lie, on any device; None if none are known.

    They are unknown, for example, if the tensor depends on an input or on random numbers.
    """
    found: dict[Node, Interval] = {}
    stack = [node]
    try:
        while stack:
            current = stack[-1]
            missing = [source for source in _sources(current) if source not in found]
            if missing:
                stack += missing
                continue
            found[current] = _rounded(current, _RULES[op_name(current)](current, found))
            stack.pop()
            if len(found) > MOST_NODES:
                raise _Unknown
    except _Unknown:
        return None
    return found[node]


def _sources(node: Node) -> list[Node]:
    """Return the tensors whose elements the rule of a node's operator reads.

    Raises:
        _Unknown: there is no rule for its operator.
    """
    name = op_name(node)
    if name not in _RULES:
        raise _Unknown
    return [] if name in _CREATED else [n for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor)]


def _rounded(node: Node, interval: Interval) -> Interval:
    """Return an interval, wider by what the operator of `node` may round.

    Raises:
        _Unknown: the dtype of the node does not hold all of it, or an element may be a NaN.
    """
    dtype = node.meta["val"].dtype
    least, greatest = interval
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        least, greatest = least - _error(least, limits.tiny), greatest + _error(greatest, limits.tiny)
        lowest, highest = limits.min, limits.max
    elif dtype == torch.bool or dtype.is_complex or max(-least, greatest) > 2**53:  # up to which floats are exact
        raise _Unknown
    else:
        lowest, highest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if not lowest <= least <= greatest <= highest:  # a NaN is in no order
        raise _Unknown
    return least, greatest


def _error(x: float, tiny: float) -> float:
    """Return what rounding may change at x; numbers below `tiny` may become zero, and zero stays what it is."""
    return abs(x) * _ROUNDING + tiny if x else 0.0


def _operand(value: Any, found: dict[Node, Interval]) -> Interval:
    """Return the interval of a tensor or of a number.

    Raises:
        _Unknown: it is a number that is not known.
    """
    if isinstance(value, Node):
        if value not in found:
            raise _Unknown
        return found[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Unknown
    return float(value), float(value)


Rule = Callable[[Node, dict[Node, Interval]], Interval]
_RULES: dict[str, Rule] = {}


def _of_corners(names: str, compute: Callable[..., float]) -> Rule:
    """Return the rule of an operator that is monotonic in each of its operands, whatever the others are."""

    def rule(node: Node, found: dict[Node, Interval]) -> Interval:
        args = bind(node)
        if args.get("alpha", 1) != 1 or args.get("rounding_mode") is not None:
            raise _Unknown
        try:
            corners = [compute(*x) for x in product(*(_operand(args[name], found) for name in names.split()))]
        except (ArithmeticError, ValueError) as error:  # such as a division by zero
            raise _Unknown from error
        if any(map(math.isnan, corners)):
            raise _Unknown
        return min(corners), max(corners)

    return rule


def _power(base: float, exponent: float) -> float:
    if base <= 0.0:
        raise _Unknown
    return math.pow(base, exponent)


def _reciprocal(node: Node, found: dict[Node, Interval]) -> Interval:
    return _quotient((1.0, 1.0), _operand(bind(node)["self"], found))


def _div(node: Node, found: dict[Node, Interval]) -> Interval:
    args = bind(node)
    if args.get("rounding_mode") is not None:
        raise _Unknown
    return _quotient(_operand(args["self"], found), _operand(args["other"], found))


def _quotient(a: Interval, b: Interval) -> Interval:
    if b[0] <= 0.0 <= b[1]:
        raise _Unknown
    corners = [x / y for x, y in product(a, b)]
    return min(corners), max(corners)


def _abs(node: Node, found: dict[Node, Interval]) -> Interval:
    least, greatest = _operand(bind(node)["self"], found)
    return max(0.0, least, -greatest), max(-least, greatest)


def _iota(node: Node, _: dict[Node, Interval]) -> Interval:
    length, start, step = (bind(node)[name] for name in ("length", "start", "step"))
    if not length or not isinstance(start, int) or not isinstance(step, int):
        raise _Unknown
    length = length if isinstance(length, int) else min(_LONGEST, torch.iinfo(node.meta["val"].dtype).max)
    return min(start, start + (length - 1) * step), max(start, start + (length - 1) * step)


def _number(name: str) -> Rule:
    return lambda node, found: _operand(bind(node)[name], found)


def _moved(node: Node, found: dict[Node, Interval]) -> Interval:
    source = node.args[0]
    if not isinstance(source, Node) or source.meta["val"].dtype != node.meta["val"].dtype:  # `view` may show bits
        raise _Unknown
    return _operand(source, found)


def _cat(node: Node, found: dict[Node, Interval]) -> Interval:
    parts = [_operand(tensor, found) for tensor in bind(node)["tensors"]]
    return min(least for least, _ in parts), max(greatest for _, greatest in parts)


def _converted(node: Node, found: dict[Node, Interval]) -> Interval:
    """Return the bounds of a conversion; one to integers cuts towards zero, by less than one."""
    least, greatest = _operand(node.args[0], found)
    return math.floor(least), math.ceil(greatest)


_RULES |= {
    "prims::iota": _iota,
    "aten::full": _number("fill_value"),
    "aten::scalar_tensor": _number("s"),
    "aten::cat": _cat,
    "aten::reciprocal": _reciprocal,
    "aten::div": _div,
    "aten::abs": _abs,
    "aten::add": _of_corners("self other", lambda a, b: a + b),
    "aten::sub": _of_corners("self other", lambda a, b: a - b),
    "aten::mul": _of_corners("self other", lambda a, b: a * b),
    "aten::neg": _of_corners("self", lambda a: -a),
    "aten::exp": _of_corners("self", math.exp),
    "aten::exp2": _of_corners("self", lambda a: math.pow(2.0, a)),
    "aten::pow": _of_corners("self exponent", _power),
    "aten::maximum": _of_corners("self other", max),
    "aten::minimum": _of_corners("self other", min),
}
_MOVES = "alias clone detach expand permute select slice squeeze t transpose unsqueeze view _unsafe_view"
_RULES |= dict.fromkeys((f"aten::{name}" for name in _MOVES.split()), _moved)
_RULES |= dict.fromkeys(("aten::_to_copy", "prims::convert_element_type"), _converted)
