"""What nodes of a graph compute from positions alone: evaluated with bounds for every rounding, in any contraction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..graph import sizes
from ..graph.nodes import bind

aten, prims = torch.ops.aten, torch.ops.prims

ROUNDING = 2.0**-21
"""More than the relative error of an operation in fp32, of the number that it is given, and of an approximation."""

Bounds = tuple[Tensor, Tensor]
"""The least and the largest value of each element of an index, fp64 on the CPU."""


def evaluated(node: Node) -> Bounds | None:
    """Bounds of the elements of a node that depend on positions alone, on any device; None for other nodes."""
    rule = _RULES.get(node.target)
    value = node.meta.get("val")
    if rule is None or not isinstance(value, Tensor):
        return None
    args = bind(node)
    source = args.get("self", args.get("a"))
    if isinstance(source, Node):
        given = evaluated(source)
        if given is None:
            return None
    else:
        given = None
    found = rule(args, value, given)
    if found is None or not value.dtype.is_floating_point:
        return found
    if value.dtype not in (torch.float32, torch.float64):
        return None
    low, high = found
    exact = (low == high) & (low.float().double() == low)
    error = torch.maximum(low.abs(), high.abs()) * ROUNDING
    return torch.where(exact, low, low - error), torch.where(exact, high, high + error)


def _iota(args: Mapping[str, Any], value: Tensor, given: Bounds | None) -> Bounds | None:
    if any(not isinstance(args[name], int) for name in ("length", "start", "step")) or args["step"] <= 0:
        return None
    positions = torch.arange(args["length"], dtype=torch.float64, device="cpu") * args["step"] + args["start"]
    return positions, positions


def _converted(args: Mapping[str, Any], value: Tensor, given: Bounds | None) -> Bounds | None:
    assert given is not None
    if value.dtype.is_floating_point:
        return given
    if value.dtype not in (torch.int32, torch.int64):
        return None
    return given[0].trunc(), given[1].trunc()


def _shaped(args: Mapping[str, Any], value: Tensor, given: Bounds | None) -> Bounds | None:
    assert given is not None
    shape = [sizes.static(size) for size in value.shape]
    if given[0].numel() != math.prod(size or 0 for size in shape):
        return None
    return given[0].reshape(shape), given[1].reshape(shape)  # type: ignore[arg-type]  # all are numbers


def _with_number(operation: Callable[[Tensor, float], Tensor], *names: str) -> Callable[..., Bounds | None]:
    """The rule of an operation with a number, which does not decrease in its first operand.

    Args:
        names: of the number among the arguments.
    """

    def rule(args: Mapping[str, Any], value: Tensor, given: Bounds | None) -> Bounds | None:
        number = next((args[name] for name in names if args.get(name) is not None), None)
        if given is None or not isinstance(number, (int, float)) or args.get("alpha", 1) != 1:
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


def _sub(args: Mapping[str, Any], value: Tensor, given: Bounds | None) -> Bounds | None:
    other = args["other"]
    if not isinstance(other, Node):
        return _with_number(torch.sub, "other")(args, value, given)
    by = evaluated(other)
    if given is None or by is None or args["alpha"] != 1:
        return None
    return given[0] - by[1], given[1] - by[0]


def _floor(args: Mapping[str, Any], value: Tensor, given: Bounds | None) -> Bounds | None:
    return None if given is None else (given[0].floor(), given[1].floor())


def _clamp(args: Mapping[str, Any], value: Tensor, given: Bounds | None) -> Bounds | None:
    numbers = args["min"], args["max"]
    if given is None or any(isinstance(number, Node) for number in numbers):
        return None
    return given[0].clamp(*numbers), given[1].clamp(*numbers)


_RULES: Mapping[Any, Callable[[Mapping[str, Any], Tensor, Bounds | None], Bounds | None]] = {
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
