"""Closed forms for the visible tiles of a band.

Query tile q holds the rows ``q*BLOCK_Q .. min((q+1)*BLOCK_Q, q_len) - 1``, kv tile kv the keys ``kv*BLOCK_KV ..
min((kv+1)*BLOCK_KV, kv_len) - 1``.  A tile pair is *visible* iff some row sees some key, that is iff the interval of
``i - j`` over the pair meets ``[lo, hi]``; ragged last tiles count with the rows and keys that exist.  For a band
both the visible q tiles of a kv tile and the visible kv tiles of a q tile are contiguous.

A visible pair is *full* iff a kernel may skip the mask there: every existing row sees every key **and** the kv tile
is complete. A ragged q tile may be full: kernels load ``lse = +inf`` for rows that do not exist, so their
probabilities are zero.

Rows that see no key, and keys that no row sees, exist too (a window with unequal lengths has them).  The others are an
interval: row i sees a key iff some j has ``max(0, i - hi) <= j <= min(kv_len - 1, i - lo)``.

The bounds are anchored top left (``lo <= i - j <= hi``); None means unbounded, and then no expression contains the
symbol.  Bounds and lengths are at most `problem.MAX_LENGTH` in magnitude, so that int32 arithmetic cannot overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from ..model.mask import Band
from .symbols import (
    BLOCK_KV,
    BLOCK_Q,
    HI,
    KV,
    KV_LEN,
    LO,
    Q_LEN,
    Expr,
    FloorDiv,
    Maximum,
    Minimum,
    Q,
    Where,
    at_least_zero,
    ceil_div,
)

N_Q = ceil_div(Q_LEN, BLOCK_Q)
N_KV = ceil_div(KV_LEN, BLOCK_KV)


Interval = tuple[Expr, Expr]
"""First and end (exclusive) of consecutive rows or keys; if empty, ``end <= first``, and end may be negative."""


@dataclass(frozen=True)
class Range:
    """A range of tiles: ``first .. end-1`` are visible, ``full_first .. full_end-1`` of them need no mask.

    Always ``0 <= first <= full_first <= full_end <= end <= number of tiles``.
    """

    first: Expr
    full_first: Expr
    full_end: Expr
    end: Expr


def _range(first: Expr, full_first: Expr, full_end: Expr, end: Expr) -> Range:
    """Return a `Range` whose full part is clamped to the visible part."""
    full_first = first if full_first == 0 else Minimum(end, Maximum(first, full_first))
    full_end = Minimum(end, full_end)
    return Range(first, full_first, full_end if full_first == 0 else Maximum(full_first, full_end), end)


def q_range(has_lo: bool, has_hi: bool, kv: Expr = KV) -> Range:
    """Return the range of q tiles that see kv tile `kv` (a valid tile index) under a band with these bounds."""
    first_key, end_key = kv * BLOCK_KV, Minimum((kv + 1) * BLOCK_KV, KV_LEN)
    first, full_first, end, full_end = sympy.Integer(0), sympy.Integer(0), N_Q, N_Q
    if has_hi:
        end = Minimum(N_Q, ceil_div(at_least_zero(end_key + HI), BLOCK_Q))
        rows = first_key + HI + 1  # rows below this one see every key of the tile as far as hi goes
        full_end = Where(rows < Q_LEN, FloorDiv(at_least_zero(rows), BLOCK_Q), N_Q)
    if has_lo:
        row = first_key + LO  # the first row that sees a key of the tile, if it exists
        first = Where(row < Q_LEN, FloorDiv(at_least_zero(row), BLOCK_Q), end)
        full_first = ceil_div(at_least_zero(end_key - 1 + LO), BLOCK_Q)
    full_end = Where((kv + 1) * BLOCK_KV <= KV_LEN, full_end, 0)
    return _range(first, full_first, full_end, end)


def kv_range(has_lo: bool, has_hi: bool, q: Expr = Q) -> Range:
    """Return the visible kv tiles of q tile `q` (a valid tile index), as expressions."""
    first_row, end_row = q * BLOCK_Q, Minimum((q + 1) * BLOCK_Q, Q_LEN)
    first, full_first, end, full_end = sympy.Integer(0), sympy.Integer(0), N_KV, FloorDiv(KV_LEN, BLOCK_KV)
    if has_lo:
        end = Minimum(N_KV, ceil_div(at_least_zero(end_row - LO), BLOCK_KV))
        full_end = Minimum(full_end, FloorDiv(at_least_zero(first_row - LO + 1), BLOCK_KV))
    if has_hi:
        key = first_row - HI  # the first key that a row of the tile sees, if it exists
        first = Where(key < KV_LEN, FloorDiv(at_least_zero(key), BLOCK_KV), end)
        full_first = ceil_div(at_least_zero(end_row - 1 - HI), BLOCK_KV)
    return _range(first, full_first, full_end, end)


def seen_rows(has_lo: bool, has_hi: bool) -> Interval:
    """Return the interval of the rows that see any key under the band, as expressions in lengths and bounds."""
    return at_least_zero(LO) if has_lo else sympy.Integer(0), Minimum(Q_LEN, KV_LEN + HI) if has_hi else Q_LEN


def seen_keys(has_lo: bool, has_hi: bool) -> Interval:
    """Return the interval of the keys that any row sees under the band, as expressions in lengths and bounds."""
    return at_least_zero(-HI) if has_hi else sympy.Integer(0), Minimum(KV_LEN, Q_LEN - LO) if has_lo else KV_LEN


def all_seen(band: Band, q_len: Expr, kv_len: Expr) -> tuple[bool, bool]:
    """Return whether every row provably sees a key, and every key is seen by a row; lengths are integers or sympy's."""
    offset = kv_len - q_len if band.anchor == "bottom_right" else 0
    bounds = {symbol: bound - offset for symbol, bound in ((LO, band.lo), (HI, band.hi)) if bound is not None}
    values = {symbol: sympy.sympify(x) for symbol, x in ({Q_LEN: q_len, KV_LEN: kv_len} | bounds).items()}

    def all_of(seen: Interval, length: Expr) -> bool:
        return tuple(x.xreplace(values) for x in seen) == (0, length)

    kind = band.lo is not None, band.hi is not None
    return all_of(seen_rows(*kind), q_len), all_of(seen_keys(*kind), kv_len)
