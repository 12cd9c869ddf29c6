"""Evaluates at compile time nodes that depend only on positions (`iota`), as bounds of each element.

The bounds hold for any rounding and FMA contraction on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...graph import sizes
from ...graph.nodes import bind

aten, prims = torch.ops.aten, torch.ops.prims

ROUNDING = 2.0**-21
"""An upper bound of the relative error of an fp32 operation, of its scalar operand, and of approximations."""

DEEPEST = 64
"""The maximum depth of nodes that are evaluated."""

Bounds = tuple[Tensor, Tensor]
"""The lower and upper bound of each element of a tensor, fp64 on the CPU."""
Known = dict[Node, Bounds | None]
"""The nodes evaluated so far in one query; None for those that cannot be."""


def evaluated(node: Node) -> Bounds | None:
    """Returns the lower and the upper bound of each element of a node's tensor, as two fp64 tensors on the CPU.

    The bounds hold on any device.  Returns None for nodes that depend on more than positions (`iota`), that contain
    operators without a rule, or in which an integer may exceed the range of its dtype.
    """
    return _evaluated(node, {}, 0)


def _evaluated(node: Node, known: Known, depth: int) -> Bounds | None:
    if node not in known:
        known[node] = _bounds(node, known, depth) if depth < DEEPEST else None
    return known[node]


def _bounds(node: Node, known: Known, depth: int) -> Bounds | None:
    rule = _RULES.get(node.target)
    value = node.meta.get("val")
    if rule is None or not isinstance(value, Tensor) or value.dtype not in _HELD:
        return None
    args = bind(node)
    operands = [args[name] for name in ("self", "a", "other") if isinstance(args.get(name), Node)]
    given = [_operand(operand, value.dtype, known, depth + 1) for operand in operands]
    bounds = [each for each in given if each is not None]
    found = rule(args, value, *bounds) if len(bounds) == len(given) else None
    return None if found is None else _rounded(*found, value.dtype)


def _operand(node: Node, dtype: torch.dtype, known: Known, depth: int) -> Bounds | None:
    """The bounds of an operand after conversion to the operator's dtype."""
    found = _evaluated(node, known, depth)
    converts = dtype.is_floating_point and node.meta["val"].dtype in _INTEGERS
    return _rounded(*found, dtype) if found is not None and converts else found


def _rounded(low: Tensor, high: Tensor, dtype: torch.dtype) -> Bounds | None:
    """The bounds of numbers after rounding to a dtype; None if they are out of range or, for integers, not exact."""
    least, largest = _HELD[dtype]
    if not bool(((low >= least) & (high <= largest)).all()):
        return None
    if not dtype.is_floating_point:
        return low, high
    exact = (low == high) & (low.float().double() == low)
    error = torch.maximum(low.abs(), high.abs()) * ROUNDING
    return torch.where(exact, low, low - error), torch.where(exact, high, high + error)


_INTEGERS = {dtype: torch.iinfo(dtype) for dtype in (torch.int32, torch.int64)}
_EXACT = 2**53
"""The largest integer up to which all integers are exact in fp64."""
_HELD: Mapping[torch.dtype, tuple[float, float]] = {
    **{dtype: (max(info.min, -_EXACT), min(info.max, _EXACT)) for dtype, info in _INTEGERS.items()},
    **{
        dtype: (torch.finfo(torch.float32).min, torch.finfo(torch.float32).max)
        for dtype in (torch.float32, torch.float64)
    },
}
"""The range of numbers that are evaluated in each dtype."""


def _is_held(number: Any, dtype: torch.dtype) -> bool:
    """Whether a scalar operand is in the range of an operator's dtype, so that it is used as it is, or rounded."""
    least, largest = _HELD[dtype]
    return isinstance(number, (int, float) if dtype.is_floating_point else int) and least <= number <= largest


def _iota(args: Mapping[str, Any], value: Tensor) -> Bounds | None:
    if any(not isinstance(args[name], int) for name in ("length", "start", "step")) or args["step"] <= 0:
        return None
    positions = torch.arange(args["length"], dtype=torch.float64, device="cpu") * args["step"] + args["start"]
    return positions, positions


def _converted(args: Mapping[str, Any], value: Tensor, given: Bounds) -> Bounds | None:
    return given if value.dtype.is_floating_point else (given[0].trunc(), given[1].trunc())


def _shaped(args: Mapping[str, Any], value: Tensor, given: Bounds) -> Bounds | None:
    shape = [sizes.static(size) for size in value.shape]
    if given[0].numel() != math.prod(size or 0 for size in shape):
        return None
    return given[0].reshape(shape), given[1].reshape(shape)  # type: ignore[arg-type]  # all are numbers


def _with_number(operation: Callable[[Tensor, float], Tensor], *names: str) -> Callable[..., Bounds | None]:
    """The rule of an operation with a scalar, monotonically increasing in its tensor operand.

    Args:
        operation: the operation.
        names: the possible argument names of the scalar.
    """

    def rule(args: Mapping[str, Any], value: Tensor, given: Bounds, *others: Bounds) -> Bounds | None:
        number: Any = next((args[name] for name in names if args.get(name) is not None), None)
        if others or not _is_held(number, value.dtype) or args.get("alpha", 1) != 1:
            return None
        if operation is torch.mul and number < 0:
            return None
        is_exact = (
            not value.dtype.is_floating_point
            or float(torch.tensor(number, dtype=torch.float32, device="cpu")) == number
        )
        error = 0.0 if is_exact else abs(number) * ROUNDING
        low, high = (torch.stack([operation(each, number + by) for by in (-error, error)]) for each in given)
        return low.amin(0), high.amax(0)

    return rule


def _sub(args: Mapping[str, Any], value: Tensor, given: Bounds, *others: Bounds) -> Bounds | None:
    if not others:
        return _with_number(torch.sub, "other")(args, value, given)
    return (given[0] - others[0][1], given[1] - others[0][0]) if args["alpha"] == 1 else None


def _floor(args: Mapping[str, Any], value: Tensor, given: Bounds) -> Bounds | None:
    return given[0].floor(), given[1].floor()


def _clamp(args: Mapping[str, Any], value: Tensor, given: Bounds) -> Bounds | None:
    numbers = args["min"], args["max"]
    if any(number is not None and not _is_held(number, value.dtype) for number in numbers):
        return None
    return given[0].clamp(*numbers), given[1].clamp(*numbers)


_RULES: Mapping[Any, Callable[..., Bounds | None]] = {
    prims.iota.default: _iota,
    prims.convert_element_type.default: _converted,
    aten._to_copy.default: _converted,
    aten.view.default: _shaped,
    aten.reshape.default: _shaped,
    aten.unsqueeze.default: _shaped,
    aten.add.Tensor: _with_number(torch.add, "other"),
    aten.sub.Tensor: _sub,
    aten.mul.Tensor: _with_number(torch.mul, "other"),
    aten.clamp_min.default: _with_number(lambda given, number: given.clamp(min=number), "min"),
    aten.clamp_max.default: _with_number(lambda given, number: given.clamp(max=number), "max"),
    aten.clamp.default: _clamp,
    aten.floor.default: _floor,
}
