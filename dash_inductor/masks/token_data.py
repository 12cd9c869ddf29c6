"""The data that a mask reads: elements of tensors that the graph computes, as opaque integers.

A `Load` is an element that depends on the batch element and the query, or on the batch element and the key; a bound of
an interval may depend on the head as well, and in a dense mask a load may depend on all of them.  How its tensor is
computed does not matter, because a mask expressed by loads reads the tensor itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import sympy
import torch
from torch.fx import Node

from ..graph.nodes import bind, op_name
from .index_expr import Algebra
from .nodes import Position, meta_of, shape_of

Axis = Literal["b", "h", "q", "kv"]

RANGES = {torch.bool: (0, 1)} | {
    dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
}
"""The supported dtypes, each with its least and greatest value."""


def _range(node: Node) -> tuple[int, int]:
    """Return the least and the greatest value that an element of a node can have.

    A sum of int64 and a number in the graph is assumed not to overflow, because no data are near 2**63.  Smaller
    integers wrap around.
    """
    dtype = meta_of(node).dtype
    least, greatest = RANGES[dtype]
    sign = _SIGNS.get(op_name(node))
    if sign is None or dtype != torch.int64:
        return least, greatest
    given = bind(node)
    number = given["other"]
    if type(number) is not int or given.get("alpha", 1) != 1 or abs(number) >= 2**62:
        return least, greatest
    more = sign * number
    return (least, greatest + more) if more < 0 else (least + more, greatest)


_SIGNS = {"aten::add": 1, "aten::sub": -1}
"""Sums of a tensor and a number, with the sign of the number."""


@dataclass(frozen=True)
class LoadIndex:
    """The index at which a load reads along one dimension of its tensor.

    Args:
        axis: the axis of the scores that the index follows; None if it is constant.
        start: the index for the first element of the axis.
        extent: the length of the axis if the dimension is longer; else None.
    """

    axis: Axis | None
    start: int
    extent: int | None = None


@dataclass(frozen=True)
class Load:
    """An element of the tensor `node` as a function of a position in the scores, such as a batch element and a key.

    `indices` has one entry per dimension of the tensor.
    """

    node: Node
    indices: tuple[LoadIndex, ...]

    def along(self, axis: Axis) -> Load:
        """Return a load of the same tensor, indexed by `axis`: "q" if this one is indexed by "kv", and vice versa."""
        other = {"q": "kv", "kv": "q"}.get(axis)
        return replace(self, indices=tuple(replace(p, axis=axis) if p.axis == other else p for p in self.indices))

    def within(self, window: Mapping[Axis, tuple[int, int]]) -> Load:
        """Return this load restricted to a window of the scores, given as (start, stop) for each axis."""

        def cut(index: LoadIndex) -> LoadIndex:
            if index.axis is None:
                return index
            start, stop = window[index.axis]
            return LoadIndex(index.axis, index.start + start, stop - start)

        return replace(self, indices=tuple(map(cut, self.indices)))

    @property
    def axes(self) -> frozenset[Axis]:
        """The axes of the scores ("b", "h", "q", "kv") whose positions index the loaded tensor."""
        return frozenset(index.axis for index in self.indices if index.axis is not None)

    @property
    def is_plane(self) -> bool:
        """Whether the load depends on pairs or heads; only dense masks have such loads."""
        return "h" in self.axes or {"q", "kv"} <= self.axes


class Loads:
    """The loads of one mask, each with the data symbol that stands for it.

    Args:
        algebra: the algebra that creates the data symbols.
        plane: the shape of the scores, [B, H, q_len, kv_len].
        position: the index symbols of the scores.
        dense: whether loads may depend on pairs and heads.
        heads: whether loads may depend on heads.
    """

    def __init__(
        self, algebra: Algebra, plane: Position, position: Position, dense: bool = False, heads: bool = False
    ) -> None:
        self._algebra = algebra
        self._dense = dense
        self._axes: dict[sympy.Expr, tuple[Axis, sympy.Expr]] = {}
        names: tuple[Axis, ...] = ("b", "h", "q", "kv")
        for name, index, extent in zip(names, position, plane, strict=True):
            if index.is_Symbol and (dense or heads or name != "h"):  # for an extent of 1, the index is 0
                self._axes[index] = name, extent
        self._symbols: dict[Load, sympy.Symbol] = {}

    def named_in(self, expr: sympy.Expr) -> tuple[tuple[sympy.Symbol, Load], ...]:
        """Return (data symbol, load) for each data symbol in an expression, in the order in which they were created."""
        return tuple((symbol, load) for load, symbol in self._symbols.items() if symbol in expr.free_symbols)

    def find(self, node: Node, position: Position) -> Load | None:
        """Return the element of `node` at `position` as a load.

        Return None if its dtype is not supported, or if a dimension is read neither at a constant index nor at
        consecutive ones that follow an axis of the scores.  Only a dense mask may be read along both "q" and "kv".
        """
        if meta_of(node).dtype not in RANGES:
            return None
        indices = [self._index(at, extent) for at, extent in zip(position, shape_of(node), strict=True)]
        known = tuple(index for index in indices if index is not None)
        axes = [index.axis for index in known if index.axis is not None]
        if len(known) < len(indices) or len(set(axes)) < len(axes):
            return None
        if {"q", "kv"} <= set(axes) and not self._dense:
            return None
        return Load(node, known)

    def symbol(self, load: Load) -> sympy.Symbol:
        """Return the data symbol that stands for a load, a new one if the load has none yet."""
        if load not in self._symbols:
            moved_by = frozenset(symbol for symbol, (axis, _) in self._axes.items() if axis in load.axes)
            self._symbols[load] = self._algebra.data(*_range(load.node), moved_by)
        return self._symbols[load]

    def _index(self, at: sympy.Expr, extent: sympy.Expr) -> LoadIndex | None:
        if at.is_Integer:
            return LoadIndex(None, int(at))
        start, symbol = at.as_coeff_Add()
        if symbol not in self._axes:
            return None
        axis, length = self._axes[symbol]
        if start == 0 and extent == length:
            return LoadIndex(axis, 0)
        if start.is_Integer and start >= 0 and length.is_Integer:
            return LoadIndex(axis, int(start), int(length))
        return None
