"""Turns the visibility of a mask element, a decision tree over positions, into a band (a diagonal band of pairs)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import sympy
import torch

from ..model.mask import MAX_LENGTH, Anchor, Band
from .index_expr import Algebra, Branch, Leaf, NotRecognised, Value, leaves


@dataclass(frozen=True)
class Scores:
    """The lengths of one attention's scores, and the sympy symbols that stand for the index of a query and of a key.

    Args:
        algebra: the algebra that knows the ranges of the symbols.
        q_len, kv_len: the lengths.
        q, kv: the index symbols; 0 for a length of 1.
        sizes: the size symbols that are lengths or the batch size.
        h: the index symbol of a query head; 0 if there is one head.
    """

    algebra: Algebra
    q_len: sympy.Expr
    kv_len: sympy.Expr
    q: sympy.Expr
    kv: sympy.Expr
    sizes: frozenset[sympy.Basic] = frozenset()
    h: sympy.Expr = sympy.S.Zero

    @property
    def offset(self) -> sympy.Expr:
        """``kv_len - q_len``: the shift of the diagonal under bottom-right anchoring."""
        return self.kv_len - self.q_len


HIDDEN = {
    torch.float16: torch.finfo(torch.float16).min,
    torch.bfloat16: torch.finfo(torch.bfloat16).min,
    torch.float32: torch.finfo(torch.bfloat16).min,
}
"""For each dtype of a mask, the largest value that hides a key.

Note [Finite values that hide]
Kernels add the mask to the scores in float32.  Minus infinity certainly hides a key.  A finite value would hide it only
if no score could outweigh it, and there is no such value: scores of float16 reach 65504**2 times the head dim and the
scale, far beyond the lowest float16 number, and scores of the other dtypes reach infinity.  By convention the lowest
finite number of a dtype hides a key all the same, because models write it (``torch.finfo(dtype).min``) with this
intent.  The dtype is the mask's own.  A float32 mask may be a cast bfloat16 mask, whose lowest number is slightly above
the lowest of float32.  Every other finite number is added to the scores as it is."""


def visibility(scores: Scores, value: Value, dtype: torch.dtype) -> tuple[Value, bool]:
    """Return (visible, infinite) for a mask of this dtype whose element at a symbolic position is `value`.

    Visible is the condition, a decision tree, under which the mask lets the query see the key.  Infinite says whether
    every hidden key is hidden by -inf, or by False for a bool mask, rather than by a large negative number.

    Raises:
        NotRecognised: "not_a_band" for other dtypes, and for numbers that neither are 0 nor hide a key.
    """
    if dtype == torch.bool:
        return value, True
    if dtype not in HIDDEN:
        raise NotRecognised("not_a_band", f"a mask of type {dtype}")
    hidden = HIDDEN[dtype]

    def leaf(x: Leaf) -> Value:
        if x == 0:
            return True
        if isinstance(x, bool) or not x.is_number or x is sympy.nan or x > hidden:
            raise NotRecognised("not_a_band", f"adds {x} to the scores, neither 0 nor the least number of {dtype}")
        return False

    infinite = all(x == 0 or x == -sympy.oo for x in leaves(value))
    return scores.algebra.lift(leaf, value), infinite


def to_band(scores: Scores, visible: Value) -> Band | None:
    """Return the band that the visibility of a pair describes; None if it shows no pair.

    Args:
        scores: the lengths and index symbols.
        visible: the visibility, a decision tree over positions.

    Raises:
        NotRecognised: "not_a_band" if it is not a band.
    """
    anchors: set[Anchor] = set()
    intervals = [_intersection(scores, path, anchors) for path in _paths(visible, ())]
    if len(anchors) > 1:
        raise NotRecognised("not_a_band", "one bound follows the top left corner, another the bottom right one")
    if scores.q_len.is_Integer and scores.kv_len.is_Integer:
        first, last = 1 - int(scores.kv_len), int(scores.q_len) - 1
        intervals = [(max(low, first), min(high, last)) for low, high in intervals]
    else:  # lengths may reach MAX_LENGTH: a bound that far away excludes nothing, or everything
        intervals = [(low, high) for low, high in intervals if low < MAX_LENGTH and high > -MAX_LENGTH]
        intervals = [
            (-math.inf if low <= -MAX_LENGTH else low, math.inf if high >= MAX_LENGTH else high)
            for low, high in intervals
        ]
    merged: list[tuple[float, float]] = []
    for low, high in sorted(i for i in intervals if i[0] <= i[1]):
        if merged and low <= merged[-1][1] + 1:
            low, previous = merged.pop()[0], merged[-1][1] if merged else high
            merged.append((low, max(high, previous)))
        else:
            merged.append((low, high))
    if not merged:
        return None
    if len(merged) > 1:
        raise NotRecognised("not_a_band", f"{len(merged)} separate bands")
    lo, hi = (None if math.isinf(x) else int(x) for x in merged[0])
    band = Band(lo, hi, next(iter(anchors), "top_left"))
    if scores.q_len.is_Integer and scores.kv_len.is_Integer:
        return band.resolve(int(scores.q_len), int(scores.kv_len))
    return band


def hides_a_row(scores: Scores, band: Band) -> bool:
    """Return whether some query may see no key under the band; False only if the ranges of lengths rule this out."""
    offset = scores.offset if band.anchor == "bottom_right" else sympy.S.Zero
    gaps = []
    if band.lo is not None:
        gaps.append(offset - band.lo)
    if band.hi is not None:
        gaps.append(band.hi + scores.offset - offset)
    lows = [scores.algebra.lower(gap) for gap in gaps]
    return any(low is None or low < 0 for low in lows)


def _paths(value: Value, path: tuple[sympy.Expr, ...]) -> Iterator[tuple[sympy.Expr, ...]]:
    """Yield each path to a visible leaf, as conditions ``>= 0`` that hold together."""
    if isinstance(value, Branch):
        yield from _paths(value.then, (*path, value.cond))
        yield from _paths(value.other, (*path, -value.cond - 1))
    elif value:
        yield path


def _intersection(scores: Scores, path: tuple[sympy.Expr, ...], anchors: set[Anchor]) -> tuple[float, float]:
    low, high = -math.inf, math.inf
    for cond in path:
        sign, bound, anchor = _diagonal_bound(scores, cond)
        anchors.add(anchor)
        low, high = (max(low, bound), high) if sign > 0 else (low, min(high, bound))
    return low, high


def _diagonal_bound(scores: Scores, cond: sympy.Expr) -> tuple[int, int, Anchor]:
    """Return ``cond >= 0`` as ``d >= bound`` (sign 1) or ``d <= bound`` (sign -1) with d = q - kv, from the anchor."""
    terms = sympy.expand(cond).as_coefficients_dict()
    of_q, of_kv = terms.get(scores.q, 0), terms.get(scores.kv, 0)
    if scores.q == 0:
        of_q = -of_kv
    if scores.kv == 0:
        of_kv = -of_q
    rest = sympy.expand(cond - of_q * scores.q - of_kv * scores.kv)
    if abs(of_q) != 1 or of_q + of_kv != 0 or any(scores.algebra.is_index(s) for s in rest.free_symbols):
        raise NotRecognised("not_a_band", f"visibility depends on {cond} >= 0")
    sign = int(of_q)
    for anchor, shift in (("top_left", sympy.S.Zero), ("bottom_right", scores.offset)):
        bound = sympy.expand(shift - sign * rest)
        if bound.is_Integer:
            return sign, int(bound), anchor  # type: ignore[return-value]  # the tuple above holds two Anchor literals
    raise NotRecognised("not_a_band", f"the bound of {cond} >= 0 is no constant")
