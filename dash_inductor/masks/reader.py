"""Interprets the producers of a mask tensor: the value of one element as a function of its position.

`MaskReader.load(node, position)` returns the element of a node at a symbolic position.  The node's rule reads its own
inputs at the positions that it needs, down to constants, index ramps and loads of data (`token_data`).  Nothing is
materialised, and nothing is assumed: an element that is not proved to be exact for all positions and sizes becomes a
load itself, or raises `NotRecognised` if it cannot be one.  The rules are in `rules.elementwise` and
`rules.arithmetic`, `rules.indexing` (creation and movement) and `rules.reductions`, keyed by operator name; arguments
are bound by name.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..graph.nodes import bind
from ..upstream.dispatch import OpOverload
from .index_expr import Algebra, Branch, Leaf, NotRecognised, Value
from .nodes import Position, as_expr, is_data, is_size, meta_of, rule_name, shape_of
from .token_data import Load, Loads

log = logging.getLogger("dash_inductor")

Rule = Callable[["MaskReader", Node, dict[str, Any], Position], Value]

MAX_ENTRIES = 2**57
"""Maximum batch size or number of heads: attention writes a gradient for each, and no address space is larger."""

_EXACT_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""For each float dtype, the n for which integers up to 2**n are exact."""


@dataclass(frozen=True)
class Way:
    """A strategy for reading a mask: which tensors are read as data, although a rule could interpret them.

    "Read as data" means that the mask is expressed by the values of the tensor, however the graph computes them.
    Booleans per key that depend on data are read in this way unless `intervals` is set.

    Args:
        words: a description, for the log.
        vectors: whether numbers and booleans per token are read as data if they are not a single expression in their
            positions.
        planes: whether booleans per pair that depend on data are read as data.
        all_planes: whether all booleans per pair are read as data.
        dense: whether loads may depend on pairs and on heads.
        intervals: whether booleans per key are interpreted by their rules, as comparisons with positions.
        positions: whether intervals may depend on positions alone, and on heads.
    """

    words: str
    vectors: bool = False
    planes: bool = False
    all_planes: bool = False
    dense: bool = False
    intervals: bool = False
    positions: bool = False


class MaskReader:
    """Returns elements of a mask, and of the nodes from which it is computed, as functions of a symbolic position.

    Args:
        rules: the rules, by operator name.
        algebra: the algebra that knows the ranges of the symbols in positions.
        loads: collects the data that are read.
        way: the strategy, which says which tensors are read as data.
    """

    def __init__(self, rules: dict[str, Rule], algebra: Algebra, loads: Loads, way: Way) -> None:
        self.algebra = algebra
        self._way = way
        self._rules = rules
        self._loads = loads
        self._data: dict[Node, bool] = {}
        self._memo: dict[tuple[Node, Position], Value] = {}
        self._bound: dict[Node, dict[str, Any]] = {}

    def load(self, node: Node, position: Position) -> Value:
        """Return the element of `node` at `position` (one index expression per dimension).

        Raises:
            NotRecognised: it can neither be interpreted nor read as data.
        """
        key = (node, position)
        if key not in self._memo:
            self._memo[key] = self._load(node, position)
        return self._memo[key]

    def _load(self, node: Node, position: Position) -> Value:
        if 0 in shape_of(node):
            raise NotRecognised("not_a_band", f"{node.name} has no elements")
        load = self._loads.find(node, position)
        if load is None:
            return self._logged(node, position, self._by_rule(node, position), "by its rule")
        if meta_of(node).dtype == torch.bool and self._is_read_whole(load):
            return self._logged(node, position, self._opaque(load), "as data")
        try:
            value = self._by_rule(node, position)
        except NotRecognised as error:
            return self._logged(node, position, self._opaque(load), f"as data, because {error.detail}")
        if self._way.vectors and isinstance(value, Branch) and not load.is_plane:
            return self._logged(node, position, self._opaque(load), f"as data, because it is {value}")
        return self._logged(node, position, value, "by its rule")

    def _is_read_whole(self, load: Load) -> bool:
        """Return whether booleans are read as data, not interpreted by their rule."""
        if load.axes <= {"b", "kv"}:
            return not self._way.intervals and is_data(load.node, self._rules, self._data)
        return self._way.all_planes or (self._way.planes and is_data(load.node, self._rules, self._data))

    def _logged(self, node: Node, position: Position, value: Value, how: str) -> Value:
        if log.isEnabledFor(logging.DEBUG):
            log.debug("mask: %s%s is %s, %s read %s", node.name, list(position), value, node.target, how)
        return value

    def _by_rule(self, node: Node, position: Position) -> Value:
        if node not in self._bound:
            self._bound[node] = bind(node) if isinstance(node.target, OpOverload) else {}
        rule = self._rules.get(rule_name(node))
        if rule is None:
            raise NotRecognised("unknown_op", f"{node.target} ({node.name})")
        return rule(self, node, self._bound[node], position)

    def _opaque(self, load: Load) -> Value:
        symbol = self._loads.symbol(load)
        return Branch(symbol - 1, True, False) if meta_of(load.node).dtype == torch.bool else symbol

    def operand(self, value: Any, position: Position) -> Value:
        """Return an operand of an elementwise operator: a tensor's element, broadcast to `position`, or a scalar."""
        if isinstance(value, bool):
            return value
        if not isinstance(value, Node) or is_size(value):
            return as_expr(value)
        shape = shape_of(value)
        tail = position[len(position) - len(shape) :]
        return self.load(value, tuple(sympy.S.Zero if n == 1 else i for n, i in zip(shape, tail, strict=True)))

    def choose(self, condition: Value, then: Callable[[], Value], other: Callable[[], Value]) -> Value:
        """Return ``then()`` where the condition holds, else ``other()``; a side that no element takes is not called."""
        if isinstance(condition, bool):
            return then() if condition else other()
        return self.algebra.choose(condition, then(), other())

    def exact(self, leaf: Leaf, dtype: torch.dtype) -> Leaf:
        """Return a value as `dtype` represents it: constants are rounded to a float dtype, others are unchanged.

        Raises:
            NotRecognised: "not_a_band" if the dtype is not proved to represent it for every position and size.
        """
        if isinstance(leaf, bool):
            return leaf
        limits = _exact_integers(dtype)
        if leaf.is_number and dtype.is_floating_point and limits is not None:
            return _rounded(leaf, dtype)
        if leaf.is_integer and limits is not None:
            low, high = self.algebra.lower(leaf), self.algebra.upper(leaf)
            if low is not None and high is not None and limits[0] <= low and high <= limits[1]:
                return leaf
        raise NotRecognised("not_a_band", f"{leaf} is not proved to be exact in {dtype}")


def _exact_integers(dtype: torch.dtype) -> tuple[int, int] | None:
    """Return the range in which a dtype represents every integer; None for dtypes that are not supported."""
    if dtype in _EXACT_BITS:
        return -(2 ** _EXACT_BITS[dtype]), 2 ** _EXACT_BITS[dtype]
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex or dtype.itemsize > 8:
        return None
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _rounded(number: sympy.Expr, dtype: torch.dtype) -> sympy.Expr:
    """Return a number rounded to a float dtype as PyTorch does: half dtypes compute in float32 and round once more."""
    if not number.is_Rational:
        return number  # infinities and NaN
    try:
        value = int(number.p) / int(number.q)
    except OverflowError:
        value = math.copysign(math.inf, number)
    return as_expr(
        torch.tensor(value, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32)).to(dtype).item()
    )
