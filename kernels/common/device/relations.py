"""Tests of the mask relations' forms (`common.relations`) in Triton: per pair, and for whole tiles.

INDEX selects a form of a mask (MASK, see `tile_pairs.Mask`).  A `Side` holds the vectors of queries or keys; the
vectors that a form reads are passed as a tuple.
"""

from typing import NamedTuple

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1)
"""The code of an invalid key; no query has it."""
ALONE = tl.constexpr(-2)
"""The code of a query whose id no key has; no key has this code."""
FAR = tl.constexpr(2**31 - 1)


class Side(NamedTuple):
    """The queries or keys of a batch element: pointer to their vectors, stored consecutively, and number of tokens."""

    VECTORS: object
    length: object


@triton.jit
def load_vector(side, row, tokens, exists, other):
    """Loads vector number `row` of tokens; `other` where they do not exist."""
    return tl.load(side.VECTORS + row * side.length + tokens, mask=exists, other=other)


@triton.jit
def of_queries(queries, tokens, exists, MASK: tl.constexpr, INDEX: tl.constexpr):
    """Loads the vectors of queries that a form reads; queries that do not exist get values with which they see no
    key.
    """
    FORM: tl.constexpr = MASK.FORMS[INDEX]
    row: tl.constexpr = MASK.Q_ROWS[INDEX]
    if FORM == "codes":
        return (load_vector(queries, row, tokens, exists, ALONE),)
    else:
        first = load_vector(queries, row, tokens, exists, FAR)
        return first, load_vector(queries, row + 1, tokens, exists, 0)


@triton.jit
def of_keys(keys, tokens, exists, MASK: tl.constexpr, INDEX: tl.constexpr):
    """Loads the vectors of keys that a form reads; for spans these are the keys' positions."""
    FORM: tl.constexpr = MASK.FORMS[INDEX]
    row: tl.constexpr = MASK.KV_ROWS[INDEX]
    if FORM == "codes":
        return (load_vector(keys, row, tokens, exists, HIDDEN),)
    elif FORM == "ranks":
        return (load_vector(keys, row, tokens, exists, 0),)
    else:
        return (tokens,)


@triton.jit
def shows(shown, queries, keys, MASK: tl.constexpr, INDEX: tl.constexpr):
    """Restricts `shown`, a bool per pair, to the pairs that a form shows; queries and keys must broadcast to the
    pairs.
    """
    FORM: tl.constexpr = MASK.FORMS[INDEX]
    if FORM == "codes":
        return shown & (queries[0] == keys[0])
    else:
        return shown & (queries[0] <= keys[0]) & (keys[0] < queries[1])


@triton.jit
def _some_row(first, behind, least, most):
    """Returns [kv tiles, q tiles]: whether the range ``first .. behind - 1`` of any row meets the range of a kv
    tile.
    """
    KV_TILES: tl.constexpr = least.shape[0]
    tiles = tl.arange(0, KV_TILES)
    found = tl.zeros([KV_TILES, first.shape[0]], tl.int1)
    for i in tl.static_range(KV_TILES):
        from_, to = tl.min(tl.where(tiles == i, least, FAR), 0), tl.max(tl.where(tiles == i, most, -1), 0)
        meets = tl.max((tl.maximum(first, from_) <= tl.minimum(behind - 1, to)).to(tl.int32), 1) != 0
        found = found | ((tiles == i)[:, None] & meets[None, :])
    return found


@triton.jit
def judges(queries, rows_exist, keys, columns_exist, MASK: tl.constexpr, INDEX: tl.constexpr):
    """Classifies tile pairs: (no pair is shown, all are, at least one is known to be), each bool [kv tiles, q tiles].

    queries, keys: vectors of the rows [q tiles, rows] and columns [kv tiles, columns], some of which may not exist.  A
    tile with missing columns may count as fully shown.  For spans the result is exact, since a tile's keys are
    contiguous.
    """
    FORM: tl.constexpr = MASK.FORMS[INDEX]
    if FORM == "codes":
        of_rows, of_columns = queries[0], keys[0]
        q_low = tl.min(tl.where(of_rows < 0, FAR, of_rows), 1)[None, :]
        q_high = tl.max(of_rows, 1)[None, :]
        kv_low = tl.min(tl.where(of_columns < 0, FAR, of_columns), 1)[:, None]
        kv_high = tl.max(of_columns, 1)[:, None]
        # All existing rows, or all keys of a complete tile, have the one code; a last row counts for those missing.
        q_one = (tl.min(tl.where(rows_exist, of_rows, FAR), 1)[None, :]) == q_high
        kv_one = tl.min(of_columns, 1)[:, None] == kv_high
        one = q_one & kv_one & (q_high == kv_high)
        meet = (q_low == kv_low) | (q_low == kv_high) | (q_high == kv_low) | (q_high == kv_high)
        return (q_high < kv_low) | (kv_high < q_low), one, meet
    else:
        first, behind = queries[0], queries[1]
        least = tl.min(tl.where(columns_exist, keys[0], FAR), 1)
        most = tl.max(tl.where(columns_exist, keys[0], -1), 1)
        all_first = tl.max(tl.where(rows_exist, first, -1), 1)[None, :]
        all_behind = tl.min(tl.where(rows_exist, behind, FAR), 1)[None, :]
        shown = (all_first <= least[:, None]) & (most[:, None] < all_behind)
        if FORM == "ranks":
            beside = (tl.min(first, 1)[None, :] > most[:, None]) | (tl.max(behind, 1)[None, :] <= least[:, None])
            return beside, shown, _some_row(first, behind, least, least) | _some_row(first, behind, most, most)
        else:
            some = _some_row(first, behind, least, most)
            return some == 0, shown, some
