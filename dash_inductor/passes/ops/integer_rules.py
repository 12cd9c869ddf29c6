"""The rules by which `uniqueness` derives facts about an operator's integer result from facts about its arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...graph import sizes
from ...graph.nodes import bind, op_name
from ...graph.sizes import Dim
from .indices import SAME, is_iota, reads_bits


@dataclass(frozen=True)
class Values:
    """What is known about the integers in a tensor, regardless of their positions.

    Attributes:
        low, high: the range: low <= integer < high.
        times: no integer occurs more often than this; None if that is not known.
        exact: whether each integer from low to high - 1 occurs exactly `times` times.
    """

    low: Dim
    high: Dim
    times: int | None = None
    exact: bool = False

    @property
    def differ(self) -> bool:
        """Whether all integers in the tensor are known to be distinct."""
        return self.times == 1

    def is_permutation(self, of: Dim) -> bool:
        """Returns whether the integers are known to be a permutation of 0 to of - 1."""
        return self.exact and self.differ and sizes.same(self.low, 0) and sizes.same(self.high, of)

    def lie_below(self, size: Dim) -> bool:
        """Returns whether all integers are known to lie between 0 and size - 1."""
        return statically_known_true(self.low >= 0) and (
            sizes.same(self.high, size) or statically_known_true(self.high <= size)
        )

    @property
    def subset(self) -> Values:
        """What is then known about any subset of the tensor's elements: the same range, but not every integer of it."""
        return replace(self, exact=False)


Known = Values | None

Facts = Mapping[Any, Values]
"""The facts about nodes; nodes without proved facts are missing."""

DTYPES = {dtype: torch.iinfo(dtype) for dtype in (torch.int64, torch.int32)}
"""The dtypes of indices and their bounds; nothing is proved for other dtypes."""


def fits(known: Values, dtype: torch.dtype) -> bool:
    """Returns whether a dtype can represent all integers in the known range, so that none has wrapped around.

    Ranges with symbolic bounds always fit into int64: these are positions of elements, or sums of a few of them.
    """
    info = DTYPES[dtype]
    if dtype == torch.int64 and not (isinstance(known.low, int) and isinstance(known.high, int)):
        return True
    return statically_known_true(known.low >= info.min) and statically_known_true(known.high - 1 <= info.max)


def integer_of(dtype: torch.dtype, number: Any) -> int | None:
    """Returns a scalar operand if it is an integer in the range of an index dtype; else None."""
    info = DTYPES.get(dtype)
    is_integer = isinstance(number, int) and not isinstance(number, bool)
    return number if is_integer and info is not None and info.min <= number <= info.max else None


def _number(node: Node, given: Any) -> int | None:
    return integer_of(node.meta["val"].dtype, given)


def _same(node: Node, args: dict[str, Any], facts: Facts) -> Known:
    return None if reads_bits(node) else facts.get(node.args[0])


def _some(node: Node, args: dict[str, Any], facts: Facts) -> Known:
    of = node.args[0]
    known = facts.get(of)
    if known is None:
        return None
    assert isinstance(of, Node)
    whole = sizes.same(node.meta["val"].numel(), of.meta["val"].numel())
    return known if whole else known.subset


def of_getitem(node: Node, facts: Facts) -> Known:
    """Returns what is known about the integers in one result of an operator with several, such as `sort` or `split`.

    Args:
        node: the `getitem` node that selects the result.
        facts: what is known about the operator's arguments.

    Returns:
        None if nothing is known.
    """
    of, number = node.args
    if not isinstance(of, Node):
        return None
    name, value = op_name(of), node.meta["val"]
    if name in ("aten::split", "aten::split_with_sizes", "aten::unbind", "aten::chunk", "aten::unsafe_split"):
        known = facts.get(of.args[0])
        return None if known is None else known.subset
    if number == 0 and name == "aten::sort":  # the same integers in another order
        return facts.get(of.args[0])
    if number != 1 or name not in ("aten::sort", "aten::topk", "aten::max", "aten::min"):
        return None
    args = bind(of)
    given = args["self"].meta["val"]
    if given.dim() == 0 or "dim" not in args:
        return None
    dim = args["dim"] % given.dim()
    length = given.shape[dim]
    if name in ("aten::max", "aten::min"):
        return Values(0, length)
    lines = [size for d, size in enumerate(given.shape) if d != dim]
    if any(sizes.static(size) != 1 for size in lines):
        return Values(0, length)
    return Values(0, length, 1, exact=sizes.same(value.shape[dim], length))


def _iota(node: Node, args: dict[str, Any], facts: Facts) -> Known:
    named = node.kwargs if op_name(node) == "prims::iota" else args
    n, start, step = node.meta["val"].shape[0], named.get("start", 0), named.get("step", 1)
    if not isinstance(start, int) or not isinstance(step, int) or step < 1:
        return None
    if step == 1:
        return Values(start, start + n, 1, exact=True)
    return Values(start, start + n * step, 1)


def _randperm(node: Node, args: dict[str, Any], facts: Facts) -> Known:
    return Values(0, node.meta["val"].shape[0], 1, exact=True)


def _expand(node: Node, args: dict[str, Any], facts: Facts) -> Known:
    known = facts.get(node.args[0])
    if known is None or known.times is None:
        return known
    of: Any = node.args[0]
    before, after = of.meta["val"].shape, node.meta["val"].shape
    factor = 1
    for back, size in enumerate(reversed(after), 1):
        same = back <= len(before) and sizes.same(before[-back], size)
        one = back > len(before) or sizes.static(before[-back]) == 1
        times = 1 if same else sizes.static(size)
        if times is None or not (same or one):
            return Values(known.low, known.high)
        factor *= times
    if factor == 0:
        return Values(known.low, known.high)
    return replace(known, times=known.times * factor)


def _quotient(node: Node, args: dict[str, Any], facts: Facts) -> Known:
    known, by = facts.get(args["self"]), _number(node, args["other"])
    if known is None or by is None or by < 1 or not statically_known_true(known.low >= 0):
        return None
    if op_name(node) == "aten::div" and args.get("rounding_mode") not in ("floor", "trunc"):
        return None
    whole = known.exact and sizes.same(known.low, 0) and sizes.same((known.high // by) * by, known.high)
    high = known.high // by if whole else (known.high + (by - 1)) // by
    return Values(0, high, None if known.times is None else known.times * by, exact=whole)


def _remainder(node: Node, args: dict[str, Any], facts: Facts) -> Known:
    known, by = facts.get(args["self"]), _number(node, args["other"])
    if by is None or by < 1:
        return None
    count = None if known is None else sizes.static(known.high)
    if known is None or known.times is None or count is None or not sizes.same(known.low, 0):
        return Values(0, by)
    each = -(-count // by)
    return Values(0, by, known.times * each, exact=known.exact and count % by == 0 and count > 0)


def _shifted(node: Node, args: dict[str, Any], facts: Facts) -> Known:
    """The facts about integers plus or minus a scalar."""
    number, alpha = _number(node, args["other"]), args.get("alpha", 1)
    known = facts.get(args["self"])
    if known is None or number is None or alpha != 1 or abs(number) > 1 << 40:
        return None
    by = -number if op_name(node) == "aten::sub" else number
    return replace(known, low=known.low + by, high=known.high + by)


def _cat(node: Node, args: dict[str, Any], facts: Facts) -> Known:
    """The facts about a concatenation: multiplicities add up, unless the ranges of the parts are disjoint."""
    parts = [facts.get(part) for part in args["tensors"]]
    if not parts or any(part is None for part in parts):
        return None
    found = parts[0]
    for part in parts[1:]:
        assert found is not None
        assert part is not None
        found = _together(found, part)
        if found is None:
            return None
    return found


def _together(a: Values, b: Values) -> Known:
    if not statically_known_true(a.low <= b.low):
        a, b = b, a
    if not statically_known_true(a.low <= b.low):
        return None
    apart = sizes.same(a.high, b.low) or statically_known_true(a.high <= b.low)
    high = b.high if apart or statically_known_true(a.high <= b.high) else a.high
    if not statically_known_true(high >= a.high) or not statically_known_true(high >= b.high):
        return None
    if a.times is None or b.times is None:
        return Values(a.low, high)
    if apart:
        exact = a.exact and b.exact and a.times == b.times and sizes.same(a.high, b.low)
        return Values(a.low, high, max(a.times, b.times), exact)
    equal = sizes.same(a.low, b.low) and sizes.same(a.high, b.high)
    return Values(a.low, high, a.times + b.times, exact=equal and a.exact and b.exact)


def _picked(of: Any, by: Any, facts: Facts) -> Known:
    """The facts about ``of[by]`` for one-dimensional tensors: indexing by a permutation keeps the integers."""
    known, picks = facts.get(of), facts.get(by)
    if known is None:
        return None
    n = of.meta["val"].shape[0]
    if picks is None or picks.times is None or known.times is None or not picks.lie_below(n):
        return Values(known.low, known.high)
    whole = picks.exact and sizes.same(picks.low, 0) and sizes.same(picks.high, n)
    return replace(known, times=known.times * picks.times, exact=known.exact and whole)


def _index(node: Node, args: dict[str, Any], facts: Facts) -> Known:
    of, by = args["self"], args["indices"]
    known = facts.get(of)
    if known is None:
        return None
    if len(by) == 1 and by[0] is not None and by[0].meta["val"].dtype == torch.bool:
        return known.subset  # where the mask is true
    if of.meta["val"].dim() == 1 and len(by) == 1:
        return _picked(of, by[0], facts)
    return Values(known.low, known.high)


def _gather(node: Node, args: dict[str, Any], facts: Facts) -> Known:
    if args["self"].meta["val"].dim() == 1:
        return _picked(args["self"], args["index"], facts)
    known = facts.get(args["self"])
    return None if known is None else Values(known.low, known.high)


def _inverse(node: Node, args: dict[str, Any], facts: Facts) -> Known:
    """The facts about an inverse permutation: 0, 1, 2, ... stored at the indices of a permutation."""
    if inverse_of(node, facts.get) is None:
        return None
    return Values(0, node.meta["val"].shape[0], 1, exact=True)


def _put_distinct(node: Node, args: dict[str, Any], facts: Facts) -> Known:
    if node.meta["val"].dim() != 1 or args["rest"] is not None:
        return None
    return facts.get(args["values"])


def _clamped(node: Node, args: dict[str, Any], facts: Facts) -> Known:
    """The facts about a clamp whose bounds the integers satisfy already."""
    known, low, high = facts.get(args["self"]), args.get("min"), args.get("max")
    if known is None or isinstance(low, Node) or isinstance(high, Node):
        return None
    inside = (low is None or statically_known_true(known.low >= low)) and (
        high is None or statically_known_true(known.high <= high + 1)
    )
    return known if inside else None


Rule = Callable[[Node, dict[str, Any], Facts], Known]
_REARRANGED = SAME | {f"aten::{name}" for name in ("permute", "transpose", "t", "flip", "roll")}
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_REARRANGED, _same),
    **dict.fromkeys(("aten::slice", "aten::select", "aten::narrow"), _some),
    **dict.fromkeys(("prims::iota", "aten::arange"), _iota),
    "aten::randperm": _randperm,
    "aten::expand": _expand,
    **dict.fromkeys(("aten::div", "aten::floor_divide"), _quotient),
    "aten::remainder": _remainder,
    **dict.fromkeys(("aten::add", "aten::sub"), _shifted),
    "aten::cat": _cat,
    "aten::index": _index,
    "aten::gather": _gather,
    **dict.fromkeys(("aten::index_put", "aten::scatter"), _inverse),
    "dash_inductor::put_distinct": _put_distinct,
    **dict.fromkeys(("aten::clamp", "aten::clamp_min", "aten::clamp_max"), _clamped),
}


def inverse_of(node: Node, known_of: Callable[[Any], Known]) -> Node | None:
    """Returns the node of the permutation whose inverse `node` is proved to compute; None if there is no proof.

    Args:
        node: the node, for example a scatter of 0, 1, 2, ... by the permutation, or the indices of its sort.
        known_of: returns what is known about the integers of another node.
    """
    name, value = op_name(node), node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() != 1:
        return None
    n = value.shape[0]
    if name == "aten::index_put":
        args = bind(node)
        if args["accumulate"] or len(args["indices"]) != 1:
            return None
        order, numbers = args["indices"][0], args["values"]
    elif name == "aten::scatter":
        args = bind(node)
        if node.kwargs.get("reduce") is not None or "src" not in args:
            return None
        order, numbers = args["index"], args["src"]
    elif name == "dash_inductor::put_distinct":
        args = bind(node)
        order, numbers = args["indices"], args["values"]
    elif node.target is operator.getitem and node.args[1] == 1 and op_name(node.args[0]) == "aten::sort":  # type: ignore[arg-type]
        args = bind(node.args[0])  # type: ignore[arg-type]
        known = known_of(args["self"])
        up = not args["descending"]
        return args["self"] if up and known is not None and known.is_permutation(n) else None
    else:
        return None
    if not isinstance(order, Node) or not isinstance(numbers, Node) or order.meta["val"].dim() != 1:
        return None
    if not is_iota(numbers) or not sizes.same(numbers.meta["val"].numel(), n):
        return None
    known = known_of(order)
    return order if known is not None and known.is_permutation(n) else None
