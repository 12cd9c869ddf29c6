"""Builds the backward's tables of packed documents on the device, see Note [Tables of documents].

All arithmetic is on integers, and no program reads what another one writes.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .relations.equal import ALONE
from .tables import HAS_BLIND, MASKED, TILE_BITS


class Blocks(NamedTuple):
    """Block sizes of `write_document_tables`.

    Q, KV: those of the backward's tiles; ROWS: of a slot, a multiple of both; SLOTS, STEPS: slots, and steps of a tile
    schedule, that are computed at once.
    """

    Q: int
    KV: int
    ROWS: int
    SLOTS: int
    STEPS: int


@triton.jit
def _ids(IDS, rows, ids_i, wanted):
    return tl.load(IDS + rows.to(tl.int64) * ids_i, mask=wanted, other=-1).to(tl.int32)


@triton.jit
def _document(Q_IDS, KV_IDS, slot, slots, ids_i, ids_j, BLOCKS: tl.constexpr):
    """Returns the first row and the length of the document of a slot; the length is 0 if the slot is in none."""
    ROWS: tl.constexpr = BLOCKS.ROWS
    first_row = slot.to(tl.int64) * ROWS
    begin = tl.load(KV_IDS + first_row * ids_j).to(tl.int32)
    number = 0  # of slots
    for first in range(0, slots, BLOCKS.SLOTS):
        others = first + tl.arange(0, BLOCKS.SLOTS)
        number += tl.sum((_ids(KV_IDS, others * ROWS, ids_j, others < slots) == begin).to(tl.int32), 0)
    before = (number - 1) * ROWS
    last = begin + before + tl.arange(0, ROWS)
    exists = (last >= 0) & (last < slots * ROWS)
    length = before + tl.sum((_ids(KV_IDS, last, ids_j, exists) == begin).to(tl.int32), 0)
    return begin, tl.where(tl.load(Q_IDS + first_row * ids_i).to(tl.int32) == begin, length, 0)


@triton.jit(do_not_specialize=["slots", "lo", "hi", "n_q"])
def write_document_tables(
    Q_IDS, KV_IDS, Q_SEGMENT_IDS, KV_SEGMENT_IDS, KEYS_SEEN, VISITS, STEPS, CONTRIBUTIONS, ids_i, ids_j, slots, lo, hi,
    n_q, TILE_SCHEDULE_LENGTH: tl.constexpr, Q_TILE: tl.constexpr, RANK: tl.constexpr, KV_RANGE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Writes what `MaskTables` has of a slot, which is BLOCKS.ROWS rows; a tile is in one slot, a slot in one document.

    One program per slot.  Q_IDS, KV_IDS: integers [rows] with strides ids_i and ids_j, the segment ids of queries and
    of keys, as `model.VarlenLayout` defines them.  Q_SEGMENT_IDS, KV_SEGMENT_IDS: int32 [rows], as `first_equal` writes
    them; KEYS_SEEN: bool [rows], as `seen` does; VISITS, STEPS, CONTRIBUTIONS: as `tables` does, of one table.  slots:
    their number; lo, hi: the bounds of the band; n_q: q tiles of all rows.  The four functions are those of the
    schedule.
    """
    ROWS: tl.constexpr = BLOCKS.ROWS
    BLOCK_Q: tl.constexpr = BLOCKS.Q
    BLOCK_KV: tl.constexpr = BLOCKS.KV
    slot = tl.program_id(0)
    rows = slot * ROWS + tl.arange(0, ROWS)
    queries, keys = _ids(Q_IDS, rows, ids_i, rows == rows), _ids(KV_IDS, rows, ids_j, rows == rows)
    tl.store(Q_SEGMENT_IDS + rows, tl.where(queries == keys, queries, ALONE))
    tl.store(KV_SEGMENT_IDS + rows, keys)
    tl.store(KEYS_SEEN + rows, queries == keys)

    begin, length = _document(Q_IDS, KV_IDS, slot, slots, ids_i, ids_j, BLOCKS)
    band = length, length, lo, hi

    q_tiles = slot * (ROWS // BLOCK_Q) + tl.arange(0, ROWS // BLOCK_Q)
    own = q_tiles - begin // BLOCK_Q
    seen = KV_RANGE(own, band, BLOCK_Q, BLOCK_KV)
    tl.store(CONTRIBUTIONS + q_tiles, tl.where(own * BLOCK_Q < length, seen[3] - seen[0], 0))

    for part in tl.static_range(ROWS // BLOCK_KV):
        kv_tile = slot * (ROWS // BLOCK_KV) + part
        kv = kv_tile - begin // BLOCK_KV
        steps = tl.where(kv * BLOCK_KV < length, TILE_SCHEDULE_LENGTH(kv, band, BLOCK_Q, BLOCK_KV), 0)
        for first in range(0, steps, BLOCKS.STEPS):
            step = first + tl.arange(0, BLOCKS.STEPS)
            q = Q_TILE(kv, step, band, BLOCK_Q, BLOCK_KV)
            of_q = KV_RANGE(q, band, BLOCK_Q, BLOCK_KV)
            has_blind = (q + 1) * BLOCK_Q > length
            masked = has_blind | (kv < of_q[1]) | (kv >= of_q[2])
            packed_tile = (q + begin // BLOCK_Q) | (RANK(q, kv, band, BLOCK_Q, BLOCK_KV) << TILE_BITS)
            packed_tile |= tl.where(masked, MASKED, 0) | tl.where(has_blind, HAS_BLIND, 0)
            tl.store(STEPS + kv_tile.to(tl.int64) * n_q + step, packed_tile, mask=step < steps)
        tl.store(VISITS + kv_tile, steps)
