"""The forms of relations (`common.relations`) in kernels in plain Triton: what they read, and their tests.

A form is number INDEX of those of a mask (MASK, see `tile_pairs.Mask`).  A `Side` has what queries or keys have; what a
form reads of them is a tuple.
"""

from typing import NamedTuple

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1)
"""The code of a key that no query sees by its validity; no query has it."""
ALONE = tl.constexpr(-2)
"""The code of a query whose id no key has; no key has it."""
FAR = tl.constexpr(2**31 - 1)


class Side(NamedTuple):
    """Queries or keys of a batch element: pointer to their vectors, one behind the other, and how many there are."""

    VECTORS: object
    length: object


@triton.jit
def load_vector(side, row, tokens, exists, other):
    """The vector number `row` of tokens, `other` where they do not exist."""
    return tl.load(side.VECTORS + row * side.length + tokens, mask=exists, other=other)


@triton.jit
def of_queries(queries, tokens, exists, MASK: tl.constexpr, INDEX: tl.constexpr):
    """The vectors of queries that a form reads, a `Side`.  Other queries see no key."""
    FORM: tl.constexpr = MASK.FORMS[INDEX]
    row: tl.constexpr = MASK.Q_ROWS[INDEX]
    if FORM == "codes":
        return (load_vector(queries, row, tokens, exists, ALONE),)
    else:
        first = load_vector(queries, row, tokens, exists, FAR)
        return first, load_vector(queries, row + 1, tokens, exists, 0)


@triton.jit
def of_keys(keys, tokens, exists, MASK: tl.constexpr, INDEX: tl.constexpr):
    """As `of_queries`, of keys."""
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
    """The pairs that are `shown` so far and that a form shows, too; queries, keys: as they broadcast to the pairs."""
    FORM: tl.constexpr = MASK.FORMS[INDEX]
    if FORM == "codes":
        return shown & (queries[0] == keys[0])
    else:
        return shown & (queries[0] <= keys[0]) & (keys[0] < queries[1])


@triton.jit
def judges(queries, rows_exist, keys, columns_exist, MASK: tl.constexpr, INDEX: tl.constexpr):
    """(no pair, all pairs, some but not all pairs are known to be shown) of each tile pair: [kv tiles, q tiles].

    queries, keys: of the rows [q tiles, rows] and the columns [kv tiles, columns] of tiles, of which some exist.  A
    tile of which columns do not exist may count as one all of whose pairs are shown.
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
        least = tl.min(tl.where(columns_exist, keys[0], FAR), 1)[:, None]
        most = tl.max(tl.where(columns_exist, keys[0], -1), 1)[:, None]
        beside = (tl.min(first, 1)[None, :] > most) | (tl.max(behind, 1)[None, :] <= least)
        all_first = tl.max(tl.where(rows_exist, first, -1), 1)[None, :]
        all_behind = tl.min(tl.where(rows_exist, behind, FAR), 1)[None, :]
        return beside, (all_first <= least) & (most < all_behind), beside != beside
