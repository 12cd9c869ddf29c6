"""Evaluates nodes of a mask on the CPU by their own operators, in windows, from given sizes and tensors.

A mask of 32768 x 32768 is never materialised: a window (a range per dimension) is propagated through elementwise
operators and data movement to vectors, which are small.  Every computing operator is called as in the graph, only on
other ranges.  This shares no rule with the symbolic interpretation, which it checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, cast

import sympy
import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from ..graph.nodes import bind, is_elementwise, op_name
from .index_expr import NotRecognised
from .nodes import is_size, meta_of

Window = tuple[tuple[int, int], ...]
"""(start, stop) for every dimension."""

SERIAL = (1 << 15) - 1
"""The most elements that PyTorch computes on the calling thread (its `GRAIN_SIZE` is 2**15).  Larger tensors wake its
other threads, which makes small operators 30 times slower if processes share cores."""
SERIAL_INDEX = 2999
"""The same limit for indexing by tensors, for which PyTorch gives each thread 3000 elements."""
SMALL = 1 << 18
"""Tensors of at most this many elements are evaluated once as a whole, and sliced."""
LARGE = 1 << 23
"""Tensors of more elements are only evaluated in windows."""

_CONSTANT = {"full": None, "full_like": None, "new_full": None, "ones": 1, "ones_like": 1, "new_ones": 1, "zeros": 0}
_CONSTANT |= {"zeros_like": 0, "new_zeros": 0}


def pieces(window: Window, most: int = SERIAL) -> Iterator[Window]:
    """Split a window into parts of at most `most` elements each, of whole rows if they fit."""
    room, cuts = most, []
    for start, stop in reversed(window):
        step = max(1, min(room, stop - start))
        cuts.append([(x, min(x + step, stop)) for x in range(start, stop, step)])
        room = max(1, room // step)
    return product(*reversed(cuts))


class RealValues:
    """The values of a graph's tensors for given values of the size symbols, on the CPU."""

    def __init__(self, sizes: dict[sympy.Symbol, sympy.Integer]) -> None:
        self._sizes = sizes
        self._given: dict[Node, torch.Tensor] = {}
        self._whole: dict[Node, torch.Tensor] = {}
        self._parts: dict[tuple[Node, Window], torch.Tensor] = {}

    def give(self, node: Node, tensor: torch.Tensor) -> None:
        """Use this tensor as the value of a node, instead of computing it."""
        self._given[node] = tensor

    def size(self, value: Any) -> Any:
        """Return a size, SymInt or number-valued node as a Python number for the given sizes; other values unchanged.

        Raises:
            NotRecognised: "value_mismatch" if it depends on symbols without a value.
        """
        if isinstance(value, Node):
            value = value.meta["val"]
        if isinstance(value, torch.SymInt):
            value = value.node.expr
        if isinstance(value, sympy.Expr):
            number = value.xreplace(self._sizes)
            if not number.is_Integer:
                raise NotRecognised("value_mismatch", f"size {value} has no value to check with")
            return int(number)
        return value

    def shape(self, node: Node) -> tuple[int, ...]:
        """Return the shape of a node's tensor for the given sizes."""
        return tuple(self.size(n) for n in meta_of(node).shape)

    def window(self, node: Node, window: Window) -> torch.Tensor:
        """Return the elements of `node` in a window, as a tensor of the window's shape.

        Args:
            node: a node with a tensor.
            window: (start, stop) for every dimension.
        """
        shape = self.shape(node)
        if node not in self._given and _count(shape) > SMALL and window != tuple((0, n) for n in shape):
            key = (node, window)
            part = self._parts[key] if key in self._parts else self._part(node, window)
            if part is not None:
                self._parts[key] = part
                return part
        return self.whole(node)[tuple(slice(*r) for r in window)]

    def _part(self, node: Node, window: Window) -> torch.Tensor | None:
        """Return a window computed from windows of the operands; None if the operator needs more than these."""
        if _count(_lengths(window)) <= _serial(node):
            return self._cut(node, window)
        joined = torch.empty(_lengths(window), dtype=meta_of(node).dtype)
        for piece in pieces(window, _serial(node)):
            part = self._cut(node, piece)
            if part is None:
                return None
            joined[tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(piece, window, strict=True))] = part
        return joined

    def _cut(self, node: Node, window: Window) -> torch.Tensor | None:
        name = op_name(node)
        if name in _WINDOWED:
            return _WINDOWED[name](self, node, bind(node), window)
        if is_elementwise(node):
            return self._call(node, lambda n: self._broadcast(n, window))
        return None

    def forget(self) -> None:
        """Free the computed parts (windows) of tensors; tensors that were computed as a whole are kept."""
        self._parts.clear()

    def whole(self, node: Node) -> torch.Tensor:
        """Return all elements of `node`.

        Raises:
            NotRecognised: "value_mismatch" if it has more than `LARGE` elements, or is not a call or an attribute.
        """
        if node in self._given:
            return self._given[node]
        if node not in self._whole:
            if _count(self.shape(node)) > LARGE:
                raise NotRecognised("value_mismatch", f"{node.target} ({node.name}) is too large to check in windows")
            if node.op == "get_attr":
                holder: Any = node.graph.owning_module
                for name in str(node.target).split("."):
                    holder = getattr(holder, name)
                self._whole[node] = holder.detach().cpu()
            else:
                shape = self.shape(node)
                joined = self._part(node, tuple((0, n) for n in shape)) if _count(shape) > _serial(node) else None
                self._whole[node] = self._call(node, self.whole) if joined is None else joined
        return self._whole[node]

    def _call(self, node: Node, tensor: Callable[[Node], torch.Tensor]) -> torch.Tensor:
        def argument(value: Any) -> Any:
            if isinstance(value, Node):
                return self.size(value) if is_size(value) else tensor(value)
            return torch.device("cpu") if isinstance(value, torch.device) else self.size(value)

        if node.op != "call_function":
            raise NotRecognised("value_mismatch", f"{node.op} {node.name} cannot be evaluated")
        constant = _constant(node)
        if constant is not None:  # the tensor argument may be a graph input
            return torch.full(self.shape(node), self.size(constant), dtype=meta_of(node).dtype)
        kwargs = {k: v for k, v in node.kwargs.items() if k != "pin_memory"}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        result = cast(Any, node.target)(*map_aggregate(node.args, argument), **map_aggregate(kwargs, argument))
        return cast(torch.Tensor, result)

    def _broadcast(self, node: Node, window: Window) -> torch.Tensor:
        shape = self.shape(node)
        tail = window[len(window) - len(shape) :]
        return self.window(node, tuple((0, 1) if n == 1 else r for n, r in zip(shape, tail, strict=True)))


def _serial(node: Node) -> int:
    return SERIAL_INDEX if op_name(node) == "aten::index" else SERIAL


def _count(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _constant(node: Node) -> Any:
    namespace, _, name = op_name(node).partition("::")
    if namespace != "aten" or name not in _CONSTANT:
        return None
    return bind(node)["fill_value"] if _CONSTANT[name] is None else _CONSTANT[name]


# Operators that move elements: the window of the source.

_Rule = Callable[[RealValues, Node, dict[str, Any], Window], "torch.Tensor | None"]


def _lengths(window: Window) -> list[int]:
    return [stop - start for start, stop in window]


def _full(values: RealValues, node: Node, args: dict[str, Any], window: Window) -> torch.Tensor:
    return torch.full((), values.size(_constant(node)), dtype=meta_of(node).dtype).expand(_lengths(window))


def _expand(values: RealValues, node: Node, args: dict[str, Any], window: Window) -> torch.Tensor:
    return values._broadcast(args["self"], window).expand(_lengths(window))


def _same_elements(values: RealValues, node: Node, args: dict[str, Any], window: Window) -> torch.Tensor | None:
    """Evaluate views that only add or remove dimensions of size 1."""
    source = values.shape(args["self"])
    kept = [(n, r) for n, r in zip(values.shape(node), window, strict=True) if n != 1]
    if "dtype" in args or [n for n in source if n != 1] != [n for n, _ in kept]:
        return None
    ranges = iter(r for _, r in kept)
    part = values.window(args["self"], tuple((0, 1) if n == 1 else next(ranges) for n in source))
    return part.reshape(_lengths(window))


def _permute(values: RealValues, node: Node, args: dict[str, Any], window: Window) -> torch.Tensor:
    order = list(range(len(window)))
    if "dims" in args:
        order = [d % len(order) for d in args["dims"]]
    elif len(order) > 1:
        a, b = args.get("dim0", 0), args.get("dim1", 1)
        order[a], order[b] = order[b], order[a]
    source = dict(zip(order, window, strict=True))
    return values.window(args["self"], tuple(source[d] for d in range(len(order)))).permute(order)


def _slice(values: RealValues, node: Node, args: dict[str, Any], window: Window) -> torch.Tensor | None:
    dim, step = args["dim"] % len(window), args.get("step", 1)
    if step != 1:
        return None
    start, end = (None if args.get(k) is None else values.size(args[k]) for k in ("start", "end"))
    first, _, _ = slice(start, end).indices(values.shape(args["self"])[dim])
    moved = tuple((a + first, b + first) if d == dim else (a, b) for d, (a, b) in enumerate(window))
    return values.window(args["self"], moved)


def _pad(values: RealValues, node: Node, args: dict[str, Any], window: Window) -> torch.Tensor:
    source, pads = list(window), list(args["pad"])
    left = {len(window) - 1 - k: values.size(p) for k, p in enumerate(pads[::2])}
    shape, missing = values.shape(args["self"]), []
    for d, (start, stop) in reversed(list(enumerate(window))):
        shifted = start - left.get(d, 0), stop - left.get(d, 0)
        source[d] = min(max(shifted[0], 0), shape[d]), min(max(shifted[1], 0), shape[d])
        before = min(max(-shifted[0], 0), stop - start)
        missing += [before, stop - start - before - (source[d][1] - source[d][0])]
    inner = values.window(args["self"], tuple(source))
    padded: torch.Tensor = torch.ops.aten.constant_pad_nd.default(inner, missing, args.get("value", 0))
    return padded


def _triangle(values: RealValues, node: Node, args: dict[str, Any], window: Window) -> torch.Tensor:
    (row, _), (column, _) = window[-2:]
    moved = values.size(args.get("diagonal", 0)) + row - column
    return cast(torch.Tensor, cast(Any, node.target)(values.window(args["self"], window), moved))


def _index(values: RealValues, node: Node, args: dict[str, Any], window: Window) -> torch.Tensor | None:
    """Evaluate an index operator on the part of the source between the least and the greatest index."""
    shape = values.shape(args["self"])
    plain = all(t is not None and meta_of(t).dtype.itemsize > 1 for t in args["indices"])
    if not plain or len(args["indices"]) != len(shape) or 0 in _lengths(window):
        return None
    indices = [values._broadcast(t, window) for t in args["indices"]]
    indices = [torch.where(i < 0, i + n, i) for i, n in zip(indices, shape, strict=True)]
    ranges = tuple((int(i.min()), int(i.max()) + 1) for i in indices)
    if any(start < 0 or stop > n for (start, stop), n in zip(ranges, shape, strict=True)):
        raise IndexError(f"{node.name} reads {ranges} of {shape}")
    source = values.window(args["self"], ranges)
    moved = [i - start for i, (start, _) in zip(indices, ranges, strict=True)]
    return cast(torch.Tensor, cast(Any, node.target)(source, moved))


def _cat(values: RealValues, node: Node, args: dict[str, Any], window: Window) -> torch.Tensor | None:
    dim = args.get("dim", 0) % len(window)
    start, stop = window[dim]
    parts, before = [], 0
    for tensor in args["tensors"]:
        shape = values.shape(tensor)
        if len(shape) != len(window):
            return None
        inner = max(start - before, 0), min(stop - before, shape[dim])
        if inner[0] < inner[1]:
            part = values.window(tensor, (*window[:dim], inner, *window[dim + 1 :]))
            parts.append(part.to(meta_of(node).dtype))
        before += shape[dim]
    return cast(torch.Tensor, cast(Any, node.target)(parts, dim)) if parts else None


def _cumsum(values: RealValues, node: Node, args: dict[str, Any], window: Window) -> torch.Tensor:
    dim = args["dim"] % len(window)
    start, stop = window[dim]
    source = values.window(args["self"], (*window[:dim], (0, stop), *window[dim + 1 :]))
    sums: torch.Tensor = cast(Any, node.target)(source, dim, dtype=args.get("dtype"))
    return sums.narrow(dim, start, stop - start)


_WINDOWED: dict[str, _Rule] = {
    f"aten::{name}": rule
    for names, rule in (
        (" ".join(_CONSTANT), _full),
        ("expand", _expand),
        ("view _unsafe_view unsqueeze squeeze", _same_elements),
        ("permute transpose t", _permute),
        ("slice", _slice),
        ("constant_pad_nd", _pad),
        ("tril triu", _triangle),
        ("index", _index),
        ("cat", _cat),
        ("cumsum", _cumsum),
    )
    for name in names.split()
}
