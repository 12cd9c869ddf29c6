"""Sums by indices that are functions of positions alone: the values of a row lie side by side, and are gathered.

The backward of resampling (`interpolate`: nearest, bilinear, bicubic) adds a gradient where an index names a place,
which grows with the position in each dimension and depends on no input.  So the values of a row are a range in each
dimension.  Bounds of the ranges are counted on the device, from the very index that the forward reads.  How long ranges
are at most is known from the graph: the index is evaluated with bounds for every rounding, in any order of contraction.

The backward of adaptive average pooling, for which PyTorch has no deterministic kernel, is a sum of that kind, too: an
element gets something from the windows that it lies in, which are side by side.

A sum of a few values becomes one pointwise kernel that fuses with what makes the values, without sorts and atomics.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..config import Config
from ..errors import described
from ..graph import sizes
from ..graph.emit import Emitter, erase_dead
from ..graph.model_line import model_line
from ..graph.nodes import bind
from ..model.reasons import Reason
from ..records.records import Record
from ..upstream.fake import unset_fake_temporarily
from .index_sums import Sum, is_sum, pays, read_put
from .rewrite import Result

log = logging.getLogger("dash_inductor")
aten, prims = torch.ops.aten, torch.ops.prims

UNROLLED, MOST = 16, 256
"""Values of a row at most that are added by one expression each, and that are added at all."""
COMPARED = 1 << 24
"""Pairs of a row and a position at most that are compared to find the ranges of a dimension."""
ROUNDING = 2.0**-21
"""More than the relative error of an operation in fp32, of the number that it is given, and of an approximation."""

_FAILED = "dash_inductor_index_ranges"  # in the metadata of an operator that an error has left as it was

Bounds = tuple[Tensor, Tensor]
"""The least and the largest value of each element of an index, fp64 on the CPU."""


@dataclass(frozen=True)
class IndexRangesRewrite:
    """Sums by indices that grow with positions, on CUDA."""

    name: ClassVar[str] = "index_ranges"

    def is_on(self, config: Config) -> bool:
        return config.rewrites == "all" and config.index_sums == "on"

    def apply(self, graph: Graph) -> Sequence[Result]:
        results = []
        for node in list(graph.nodes):
            if node.target in _POOLS and _FAILED not in node.meta and is_sum(node):
                windows = _windows(node)
                if windows is not None:
                    results.append(Result(_unpooled(node, windows)))
            if node.target not in (aten.index_put.default, aten._unsafe_index_put.default) or _FAILED in node.meta:
                continue
            found = read_put(node) if is_sum(node) else None
            if found is None or found.base is not None or found.values_shape is not None or not pays(found):
                continue
            with unset_fake_temporarily():
                longest = _longest(found)
            if longest is not None and math.prod(longest) <= MOST:
                results.append(Result(_rewritten(node, found, longest)))
        return results

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """A sum that is left is right, and as fast as PyTorch has it."""
        return []


def _longest(found: Sum) -> list[int] | None:
    """How many positions in each dimension have one index at most; None if the index is another one."""
    tensors, lengths = found.index.tensors, found.index.lengths
    dims = max(tensor.meta["val"].dim() for tensor in tensors)
    if dims != len(tensors):
        return None
    longest = []
    for axis, (tensor, length) in enumerate(zip(tensors, lengths, strict=True)):
        shape = [sizes.static(size) for size in tensor.meta["val"].shape]
        shape = [*[1] * (dims - len(shape)), *shape]
        if any(size != 1 for dim, size in enumerate(shape) if dim != axis) or not isinstance(length, int):
            return None
        number = shape[axis]
        if number is None or not number or number * length > COMPARED:
            return None
        bounds = evaluated(tensor)
        if bounds is None:
            return None
        low, high = (bound.reshape(-1).long() for bound in bounds)
        if int(low.min()) < 0 or int(high.max()) >= length:
            return None
        changes = torch.zeros(length + 1, dtype=torch.int64, device="cpu")
        one = torch.ones_like(low)
        longest.append(int(changes.index_add(0, low, one).index_add(0, high + 1, -one).cumsum(0).max()))
    return longest


def evaluated(node: Node) -> Bounds | None:
    """Bounds of the elements of a node that grow with positions, whatever device computes them; None for other nodes.

    Every operation is monotonic on every device, so that elements do not decrease with the position that they are of.
    """
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
        return operation(given[0], number), operation(given[1], number)

    return rule


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
    aten.sub.Tensor: _with_number(torch.sub, "other"),
    aten.mul.Tensor: _with_number(torch.mul, "other"),
    aten.clamp_min.default: _with_number(lambda given, number: given.clamp(min=number), "min"),
    aten.clamp_max.default: _with_number(lambda given, number: given.clamp(max=number), "max"),
    aten.clamp.default: _clamp,
    aten.floor.default: _floor,
}


@dataclass(frozen=True)
class Windows:
    """The windows of an adaptive pooling in one dimension, of which number i is [i * size // count, ...).

    Attributes:
        size, count: of the dimension, and of windows.
    """

    size: int
    count: int

    @property
    def begins(self) -> list[int]:
        return [i * self.size // self.count for i in range(self.count)]

    @property
    def ends(self) -> list[int]:
        return [-(-(i + 1) * self.size // self.count) for i in range(self.count)]

    @property
    def longest(self) -> int:
        """How many windows an element lies in at most."""
        changes = [0] * (self.size + 1)
        for begin, end in zip(self.begins, self.ends, strict=True):
            changes[begin] += 1
            changes[end] -= 1
        return max(itertools.accumulate(changes))

    def range(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """int64 [size]: the first window of each element, and the first behind the last; int64 [count]: lengths."""
        positions = torch.arange(self.count, device=device)
        begins = positions * self.size // self.count
        ends = ((positions + 1) * self.size + self.count - 1) // self.count
        elements = torch.arange(self.size, device=device)[:, None]
        return (ends[None] <= elements).sum(1), (begins[None] <= elements).sum(1), ends - begins


_POOLS: Mapping[Any, int] = {
    aten._adaptive_avg_pool2d_backward.default: 2,
    aten._adaptive_avg_pool3d_backward.default: 3,
}
"""Backwards of adaptive average pooling, and how many dimensions they pool."""


def _windows(node: Node) -> list[Windows] | None:
    """The windows of a backward of pooling; None for dynamic sizes and for too many windows of an element."""
    gradient, dims = bind(node)["grad_output"].meta["val"], _POOLS[node.target]
    pairs = [[sizes.static(size) for size in value.shape[-dims:]] for value in (node.meta["val"], gradient)]
    windows = []
    for size, count in zip(*pairs, strict=True):
        if not size or not count or size * count > COMPARED:
            return None
        windows.append(Windows(size, count))
    return windows if math.prod(window.longest for window in windows) <= MOST else None


def unpooled(gradient: Tensor, windows: Sequence[Windows]) -> Tensor:
    """The gradient of what was pooled, [..., sizes], from that of the averages of windows, [..., counts]."""
    ranges = [window.range(gradient.device) for window in windows]
    batch = gradient.dim() - len(windows)
    numbers = functools.reduce(
        torch.mul, (lengths.reshape(-1, *[1] * (len(windows) - 1 - axis)) for axis, (*_, lengths) in enumerate(ranges))
    )
    exact = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    bounds = [bound for begin, end, _ in ranges for bound in (begin, end)]
    longest = [window.longest for window in windows]
    return by_ranges(gradient.to(exact) / numbers, *bounds, batch=batch, longest=longest).to(gradient.dtype)


def _unpooled(node: Node, windows: Sequence[Windows]) -> Record:
    """Rewrite one backward of pooling; returns its record."""
    longest = [window.longest for window in windows]
    gradient = bind(node)["grad_output"]
    function = functools.partial(unpooled, windows=windows)
    return _recorded(
        node, gradient, longest, lambda emitter: emitter.inline(function, (gradient,), before=node, like=node)
    )


def _rewritten(node: Node, found: Sum, longest: list[int]) -> Record:
    """Rewrite one sum; returns its record."""

    def emit(emitter: Emitter) -> Node:
        ranges = [
            _range(emitter, tensor, length, node)
            for tensor, length in zip(found.index.tensors, found.index.lengths, strict=True)
        ]
        bounds = tuple(itertools.chain.from_iterable(ranges))
        function = functools.partial(by_ranges, batch=found.batch, longest=longest)
        return emitter.inline(function, (found.values, *bounds), before=node, like=node)

    return _recorded(node, found.values, longest, emit)


def _recorded(node: Node, values: Node, longest: list[int], emit: Callable[[Emitter], Node]) -> Record:
    """Put what `emit` makes in the place of a node, which an error leaves as it was; returns its record."""
    line, module = model_line([node, *node.users])
    facts: dict[str, object] = {
        "shape": [sizes.static(size) for size in node.meta["val"].shape],
        "values": [sizes.static(size) for size in values.meta["val"].shape],
        "longest": longest,
        "dtype": str(node.meta["val"].dtype).removeprefix("torch."),
    }
    name, op, error, emitter = node.name, str(node.target), "", Emitter(node.graph)
    try:
        result = emit(emitter)
    except Exception as raised:
        log.debug("%s", node, exc_info=raised)
        emitter.discard()
        node.meta[_FAILED] = True
        error = described(raised)
    else:
        node.replace_all_uses_with(result)
        erase_dead(node.graph, [node])
    return Record(
        rewrite=IndexRangesRewrite.name,
        name=name,
        op=op,
        status="kept" if error else "replaced",
        reason=Reason.INTERNAL_ERROR if error else None,
        detail=error or f"a sum of {' x '.join(map(str, longest))} values at most, side by side",
        line=line,
        module=module,
        facts=facts,
    )


def _range(emitter: Emitter, index: Node, length: Any, node: Node) -> tuple[Node, Node]:
    """The bounds of the ranges of a dimension."""
    begin, end = (
        emitter.inline(functools.partial(_counted, length=length, or_equal=equal), (index,), before=node, like=node)
        for equal in (False, True)
    )
    return begin, end


def _counted(index: Tensor, length: int, or_equal: bool) -> Tensor:
    """int64 [length]: how many elements of an index are less than each row, or equal to it."""
    rows = torch.arange(length, device=index.device)[:, None]
    flat = index.reshape(1, -1)
    return (flat <= rows if or_equal else flat < rows).sum(1)


def by_ranges(values: Tensor, *bounds: Tensor, batch: int, longest: Sequence[int]) -> Tensor:
    """The sums of values by ranges.

    Args:
        values: [batch..., positions of each dimension, columns...].
        bounds: of the ranges of each row, begin and end of the first dimension, of the second and so on, int64.
        batch: leading dimensions of `values` in front of those of positions.
        longest: the length of the longest range in each dimension.
    """
    axes, exact = len(longest), torch.float64 if values.dtype == torch.float64 else torch.float32
    begins, ends, lengths = bounds[::2], bounds[1::2], values.shape[batch : batch + len(longest)]
    columns = values.dim() - batch - axes

    def term(offsets: Sequence[Any], behind: int) -> Tensor:
        """The values so far behind the first ones of ranges; `behind` dimensions of offsets follow those of rows."""
        places, inside = [], None
        for axis, offset in enumerate(offsets):
            around = [1] * (axes + behind)
            around[axis] = -1
            at, end = begins[axis].reshape(around) + offset, ends[axis].reshape(around)
            here = at < end
            inside = here if inside is None else inside & here
            places.append(at.clamp(max=lengths[axis] - 1))
        assert inside is not None
        found = aten._unsafe_index.Tensor(values, [None] * batch + places).to(exact)
        return torch.where(inside.reshape(*inside.shape, *[1] * columns), found, 0.0)

    if math.prod(longest) <= UNROLLED:
        terms = (term(offsets, 0) for offsets in itertools.product(*map(range, longest)))
        return functools.reduce(torch.add, terms).to(values.dtype)
    offsets = []
    for axis, length in enumerate(longest):
        around = [1] * (2 * axes)
        around[axes + axis] = -1
        offsets.append(torch.arange(length, device=values.device).reshape(around))
    whole = term(offsets, axes)
    return whole.sum([*range(batch + axes, batch + 2 * axes)]).to(values.dtype)
