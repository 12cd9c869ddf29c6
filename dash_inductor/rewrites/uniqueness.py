"""What a graph proves about the integers of a tensor: where they lie, how often each occurs, what permutation they are.

Nothing is sampled.  A rule (`RULES`) is a function from what is known of an operator's inputs to what is known of its
result, and says None where it cannot prove anything for all inputs of the program.  Proofs begin at operators whose
results are places of elements by definition: `sort`, `topk`, `arange`, `randperm`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..graph import sizes
from ..graph.nodes import bind, op_name
from ..graph.sizes import Dim
from .indices import SAME, is_iota, reads_bits, source

DEEPEST = 64
"""Nodes one behind another at which a proof stops."""


@dataclass(frozen=True)
class Values:
    """What is known of the integers of a tensor, wherever they stand in it.

    Attributes:
        low, high: low <= integer < high.
        times: none occurs more often; None if that is not known.
        exact: each integer from low to high - 1 occurs `times` times.
    """

    low: Dim
    high: Dim
    times: int | None = None
    exact: bool = False

    @property
    def differ(self) -> bool:
        """Whether no two of them are equal."""
        return self.times == 1

    def is_permutation(self, of: Dim) -> bool:
        """Whether they are the integers from 0 to of - 1, each once."""
        return self.exact and self.differ and sizes.same(self.low, 0) and sizes.same(self.high, of)

    def lie_below(self, size: Dim) -> bool:
        """Whether all of them lie from 0 to size - 1."""
        return statically_known_true(self.low >= 0) and (
            sizes.same(self.high, size) or statically_known_true(self.high <= size)
        )

    @property
    def subset(self) -> Values:
        """What is known of some of them."""
        return replace(self, exact=False)


Known = Values | None


def values_of(node: Any, depth: int = 0) -> Known:
    """What the graph proves about the integers of a node."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or value.dtype not in _RANGES or depth > DEEPEST:
        return None
    if node.target is operator.getitem:
        found = _of_getitem(node, depth + 1)
    else:
        rule = RULES.get(op_name(node))
        found = rule(node, bind(node), depth + 1) if rule is not None else None
    return found if found is not None and _fits(found, value.dtype) else None


def distinct_along(node: Node, dim: int, depth: int = 0) -> bool:
    """Whether no two integers of a line along a dimension are equal."""
    value: Tensor = node.meta["val"]
    if value.dim() == 0 or sizes.static(value.shape[dim]) == 1 or depth > DEEPEST:
        return value.dim() == 0 or sizes.static(value.shape[dim]) == 1
    known = values_of(node, depth)
    if known is not None and known.differ:
        return True
    if node.target is operator.getitem and node.args[1] == 1:
        of = node.args[0]
        assert isinstance(of, Node)
        if op_name(of) in ("aten::sort", "aten::topk"):
            return bool(bind(of)["dim"] % value.dim() == dim)
    name, before = op_name(node), node.args[0] if node.args else None
    if name in _LINES and isinstance(before, Node):
        fits = not name.endswith(("_to_copy", "convert_element_type")) or known is not None
        return fits and distinct_along(before, dim, depth + 1)
    return False


_LINES = frozenset(f"aten::{name}" for name in ("alias", "clone", "contiguous", "detach", "slice", "_to_copy")) | {
    "prims::convert_element_type"
}
"""Operators that leave in a line of their result some integers of the same line of their argument."""


@dataclass(frozen=True)
class Lists:
    """Indices that name each of `rows` numbers exactly `times` times.

    Attributes:
        order: a node that is a permutation; None for 0, 1, 2 and so on.
        times: index number i is order[i] // times, or, if `strided`, order[i] % rows.
    """

    order: Node | None
    times: int
    strided: bool = False


def lists_of(node: Node, rows: Dim) -> Lists | None:
    """Indices, in the order of rows, as a permutation that names each row equally often; None if that is not proved.

    That there are as many rows as the permutation names is certain, or so for the tensors at hand, by a guard.
    """
    node = source(node)
    count = node.meta["val"].numel()
    known = values_of(node)
    if known is not None and known.is_permutation(count):
        return Lists(None if is_iota(node) else node, 1) if sizes.made_same(count, rows) else None
    return _divided(node, rows, count)


def _divided(node: Node, rows: Dim, count: Dim) -> Lists | None:
    """Lists of several indices for each row, as MoE layers name tokens."""
    name = op_name(node)
    if name in ("aten::div", "aten::floor_divide"):
        args = bind(node)
        over, times = args["self"], args["other"]
        if not isinstance(times, int) or times < 1 or (name == "aten::div" and args.get("rounding_mode") != "floor"):
            return None
        return _of_permutation(over, times, rows, count, strided=False)
    if name == "aten::remainder":
        args = bind(node)
        over, over_rows = args["self"], args["other"]
        known = sizes.static(count)
        if not isinstance(over_rows, int) or known is None or over_rows < 1 or known % over_rows:
            return None
        return _of_permutation(over, known // over_rows, rows, count, strided=True)
    if name == "aten::index":  # [0, 0, 1, 1, ...][permutation]
        args = bind(node)
        if len(args["indices"]) != 1 or args["self"].meta["val"].dim() != 1:
            return None
        times = _repeated(args["self"], rows)
        return None if times is None else _of_permutation(args["indices"][0], times, rows, count, strided=False)
    times = _repeated(node, rows)
    return None if times is None else Lists(None, times)


def _of_permutation(order: Any, times: int, rows: Dim, count: Dim, strided: bool) -> Lists | None:
    if not isinstance(order, Node):
        return None
    order = source(order)
    known = values_of(order)
    if known is None or not known.is_permutation(count) or not sizes.same(order.meta["val"].numel(), count):
        return None
    if not sizes.made_same(rows * times, count):
        return None
    return Lists(None if is_iota(order) else order, times, strided)


def _repeated(node: Node, rows: Dim) -> int | None:
    """How often a node repeats 0, 1, 2 and so on up to rows - 1, each number several times in a row."""
    node = source(node)
    if op_name(node) != "aten::expand":
        return None
    of = node.args[0]
    assert isinstance(of, Node)
    shape, before = node.meta["val"].shape, of.meta["val"].shape
    times = sizes.static(shape[-1]) if len(shape) == 2 else None
    if times is None or len(before) != 2 or sizes.static(before[1]) != 1:
        return None
    return times if is_iota(of) and sizes.same(before[0], rows) and sizes.same(shape[0], rows) else None


# ---- rules ----

_RANGES = {dtype: torch.iinfo(dtype) for dtype in (torch.int64, torch.int32)}


def _fits(known: Values, dtype: torch.dtype) -> bool:
    """Whether a dtype holds the integers.  int64 holds the places of all elements, and sums of some of them."""
    info = _RANGES[dtype]
    if dtype == torch.int64 and not (isinstance(known.low, int) and isinstance(known.high, int)):
        return True
    return statically_known_true(known.low >= info.min) and statically_known_true(known.high - 1 <= info.max)


def _same(node: Node, args: dict[str, Any], depth: int) -> Known:
    return None if reads_bits(node) else values_of(node.args[0], depth)


def _some(node: Node, args: dict[str, Any], depth: int) -> Known:
    of = node.args[0]
    known = values_of(of, depth)
    if known is None:
        return None
    assert isinstance(of, Node)
    whole = sizes.same(node.meta["val"].numel(), of.meta["val"].numel())
    return known if whole else known.subset


def _of_getitem(node: Node, depth: int) -> Known:
    of, number = node.args
    if not isinstance(of, Node):
        return None
    name, value = op_name(of), node.meta["val"]
    if name in ("aten::split", "aten::split_with_sizes", "aten::unbind", "aten::chunk", "aten::unsafe_split"):
        known = values_of(of.args[0], depth)
        return None if known is None else known.subset
    if number == 0 and name == "aten::sort":  # the same integers in another order
        return values_of(of.args[0], depth)
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


def _iota(node: Node, args: dict[str, Any], depth: int) -> Known:
    named = node.kwargs if op_name(node) == "prims::iota" else args
    n, start, step = node.meta["val"].shape[0], named.get("start", 0), named.get("step", 1)
    if not isinstance(start, int) or not isinstance(step, int) or step < 1:
        return None
    if step == 1:
        return Values(start, start + n, 1, exact=True)
    return Values(start, start + n * step, 1)


def _randperm(node: Node, args: dict[str, Any], depth: int) -> Known:
    return Values(0, node.meta["val"].shape[0], 1, exact=True)


def _expand(node: Node, args: dict[str, Any], depth: int) -> Known:
    known = values_of(node.args[0], depth)
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


def _quotient(node: Node, args: dict[str, Any], depth: int) -> Known:
    known, by = values_of(args["self"], depth), args["other"]
    if known is None or not isinstance(by, int) or by < 1 or not statically_known_true(known.low >= 0):
        return None
    if op_name(node) == "aten::div" and args.get("rounding_mode") not in ("floor", "trunc"):
        return None
    whole = known.exact and sizes.same(known.low, 0) and sizes.same((known.high // by) * by, known.high)
    high = known.high // by if whole else (known.high + (by - 1)) // by
    return Values(0, high, None if known.times is None else known.times * by, exact=whole)


def _remainder(node: Node, args: dict[str, Any], depth: int) -> Known:
    known, by = values_of(args["self"], depth), args["other"]
    if not isinstance(by, int) or by < 1:
        return None
    count = None if known is None else sizes.static(known.high)
    if known is None or known.times is None or count is None or not sizes.same(known.low, 0):
        return Values(0, by)
    each = -(-count // by)
    return Values(0, by, known.times * each, exact=known.exact and count % by == 0 and count > 0)


def _shifted(node: Node, args: dict[str, Any], depth: int) -> Known:
    """A number added to integers or subtracted from them."""
    number, alpha = args["other"], args.get("alpha", 1)
    known = values_of(args["self"], depth)
    if known is None or not isinstance(number, int) or alpha != 1 or abs(number) > 1 << 40:
        return None
    by = -number if op_name(node) == "aten::sub" else number
    return replace(known, low=known.low + by, high=known.high + by)


def _cat(node: Node, args: dict[str, Any], depth: int) -> Known:
    """One tensor behind another: the counts add up, unless the tensors have other integers."""
    parts = [values_of(part, depth) for part in args["tensors"]]
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


def _picked(of: Any, by: Any, depth: int) -> Known:
    """of[by] of one dimension: by a permutation the same integers, else some of them, perhaps repeated."""
    known, picks = values_of(of, depth), values_of(by, depth)
    if known is None:
        return None
    n = of.meta["val"].shape[0]
    if picks is None or picks.times is None or known.times is None or not picks.lie_below(n):
        return Values(known.low, known.high)
    whole = picks.exact and sizes.same(picks.low, 0) and sizes.same(picks.high, n)
    return replace(known, times=known.times * picks.times, exact=known.exact and whole)


def _index(node: Node, args: dict[str, Any], depth: int) -> Known:
    of, by = args["self"], args["indices"]
    known = values_of(of, depth)
    if known is None:
        return None
    if len(by) == 1 and by[0] is not None and by[0].meta["val"].dtype == torch.bool:
        return known.subset  # where the mask is true
    if of.meta["val"].dim() == 1 and len(by) == 1:
        return _picked(of, by[0], depth)
    return Values(known.low, known.high)


def _gather(node: Node, args: dict[str, Any], depth: int) -> Known:
    if args["self"].meta["val"].dim() == 1:
        return _picked(args["self"], args["index"], depth)
    known = values_of(args["self"], depth)
    return None if known is None else Values(known.low, known.high)


def _inverse(node: Node, args: dict[str, Any], depth: int) -> Known:
    """0, 1, 2 and so on stored by a permutation, whatever they are stored into."""
    if inverted(node) is None:
        return None
    return Values(0, node.meta["val"].shape[0], 1, exact=True)


def _put_distinct(node: Node, args: dict[str, Any], depth: int) -> Known:
    if node.meta["val"].dim() != 1 or args["rest"] is not None:
        return None
    return values_of(args["values"], depth)


def _clamped(node: Node, args: dict[str, Any], depth: int) -> Known:
    """Integers that lie in the bounds already."""
    known, low, high = values_of(args["self"], depth), args.get("min"), args.get("max")
    if known is None or isinstance(low, Node) or isinstance(high, Node):
        return None
    inside = (low is None or statically_known_true(known.low >= low)) and (
        high is None or statically_known_true(known.high <= high + 1)
    )
    return known if inside else None


Rule = Callable[[Node, dict[str, Any], int], Known]
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


def inverted(node: Node) -> Node | None:
    """The permutation of which a node is the inverse; None if that is not proved."""
    node = source(node)
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
        known = values_of(args["self"])
        up = not args["descending"]
        return args["self"] if up and known is not None and known.is_permutation(n) else None
    else:
        return None
    if not isinstance(order, Node) or not isinstance(numbers, Node) or order.meta["val"].dim() != 1:
        return None
    if not is_iota(numbers) or not sizes.same(numbers.meta["val"].numel(), n):
        return None
    known = values_of(order)
    return order if known is not None and known.is_permutation(n) else None
