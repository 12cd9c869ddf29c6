"""Builds the tables of `schedule.table_tile_schedule` on the device, from the kinds of tile pairs (`tile_pairs`).

`rank_contributors` and `write_tile_schedules` build the backward's tables, `write_rows` the forward's.

All arithmetic is on integers, no program reads what another program of the same kernel writes, and the tables of a
batch element depend only on its own data.
"""

import triton
import triton.language as tl

from ....schedule import table_tile_schedule
from .tile_pairs import EMPTY, PARTIAL

TILE_BITS = tl.constexpr(table_tile_schedule.TILE_BITS)
MASKED = tl.constexpr(table_tile_schedule.packed_tile(0, 0, True))
FORWARD_TILE_BITS = tl.constexpr(table_tile_schedule.FORWARD_TILE_BITS)
FORWARD_UNSEEN = tl.constexpr(table_tile_schedule.FORWARD_UNSEEN)
HAS_BLIND = tl.constexpr(table_tile_schedule.packed_tile(0, 0, False, True))


@triton.jit(do_not_specialize=["q_len", "kv_len", "lo", "hi", "n_q", "n_kv"])
def rank_contributors(
    KINDS, RANKS, CONTRIBUTIONS, q_len, kv_len, lo, hi, n_q, n_kv,
    RANK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Ranks the kv tiles that add to the dq of a q tile, in the order of the schedule, from 0 on.

    One program per (table, kv tile, COLUMNS q tiles); kv tile n_kv, one past the last, stands for the programs that
    count all kv tiles that a q tile sees.

    KINDS: int8 [tables, n_kv, n_q], as `classify` writes them.  RANKS: int32 [tables, n_kv, n_q], by Note [Tables]; not
    written where a kv tile does not contribute.  CONTRIBUTIONS: int32 [tables, n_q], the counts.  ROWS kv tiles are
    read together; RANK: a function of the schedule, as `dash_rank`.
    """
    table = tl.program_id(0).to(tl.int64)
    kinds = KINDS + table * n_kv * n_q
    kv = tl.program_id(1)
    tile_schedule = q_len, kv_len, lo, hi
    q = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = q < n_q
    own = tl.zeros([COLUMNS], tl.int32)
    if kv < n_kv:
        wanted = wanted & (tl.load(kinds + kv * n_q + q, mask=wanted, other=0) != EMPTY)
        own += RANK(q, kv, tile_schedule, BLOCK_Q, BLOCK_KV)
    if tl.max(wanted.to(tl.int32), 0) > 0:
        count = tl.zeros([COLUMNS], tl.int32)
        for first in range(0, n_kv, ROWS):
            other = first + tl.arange(0, ROWS)[:, None]
            present = wanted[None, :] & (other < n_kv)
            counted = tl.load(kinds + other * n_q + q[None, :], mask=present, other=0) != EMPTY
            before = RANK(q[None, :], other, tile_schedule, BLOCK_Q, BLOCK_KV) < own[None, :]
            count += tl.sum((counted & (before | (kv == n_kv))).to(tl.int32), 0)
        if kv < n_kv:
            tl.store(RANKS + (table * n_kv + kv) * n_q + q, count, mask=wanted)
        else:
            tl.store(CONTRIBUTIONS + table * n_q + q, count, mask=wanted)


@triton.jit
def _lacks_partners(FOUND, tiles, wanted, length, BLOCK: tl.constexpr):
    """Returns whether each of the `wanted` tiles has a token without a partner; FOUND: a row of `seen`, [length]."""
    tokens = tiles[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    found = tl.load(FOUND + tokens, mask=wanted[:, None] & (tokens < length), other=1)
    return tl.min(found.to(tl.int32), 1) == 0


@triton.jit(do_not_specialize=["q_len", "kv_len", "lo", "hi", "n_q", "n_kv"])
def write_tile_schedules(
    KINDS, RANKS, Q_FOUND, VISITS, STEPS, q_len, kv_len, lo, hi, n_q, n_kv,
    TILE_SCHEDULE_LENGTH: tl.constexpr, Q_TILE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes the backward's tile schedule of each kv tile, by Note [Tables], COLUMNS steps at a time.

    One program per (table, kv tile).  KINDS, RANKS: as for `rank_contributors`; Q_FOUND: as `seen` writes it.  VISITS:
    int32 [tables, n_kv], steps of a tile schedule.  STEPS: int32 [tables, n_kv, n_q], as
    `table_tile_schedule.packed_tile`; entries that no tile schedule uses are not written.  TILE_SCHEDULE_LENGTH,
    Q_TILE: functions of the schedule, as `dash_visits` and `dash_q_tile`.
    """
    table = tl.program_id(0).to(tl.int64)
    kinds = KINDS + table * n_kv * n_q
    kv = tl.program_id(1)
    tile_schedule = q_len, kv_len, lo, hi
    row = table * n_kv + kv
    found = Q_FOUND + table * q_len
    length = TILE_SCHEDULE_LENGTH(kv, tile_schedule, BLOCK_Q, BLOCK_KV)
    count = 0
    for first in range(0, length, COLUMNS):
        step = first + tl.arange(0, COLUMNS)
        q = Q_TILE(kv, step, tile_schedule, BLOCK_Q, BLOCK_KV)
        inside = (step < length) & (q >= 0) & (q < n_q)
        kind = tl.load(kinds + kv * n_q + q, mask=inside, other=0)
        visible = inside & (kind != EMPTY)
        rank = tl.load(RANKS + row * n_q + q, mask=visible, other=0)
        at = count + tl.cumsum(visible.to(tl.int32), 0) - 1
        masked = visible & (kind == PARTIAL)
        packed_tile = q | (rank << TILE_BITS) | tl.where(masked, MASKED, 0)
        packed_tile |= tl.where(_lacks_partners(found, q, masked, q_len, BLOCK_Q), HAS_BLIND, 0)
        tl.store(STEPS + row * n_q + at, packed_tile, mask=visible)
        count += tl.sum(visible.to(tl.int32), 0)
    tl.store(VISITS + row, count)


@triton.jit
def _kinds_of(kinds, block, kv, blocks, n_kv):
    """Loads the kinds of kv tiles for a row block; EMPTY if the row block does not exist."""
    inside = (kv >= 0) & (kv < n_kv) & (block >= 0) & (block < blocks)
    return tl.load(kinds + kv.to(tl.int64) * blocks + block, mask=inside, other=0).to(tl.int32)


@triton.jit(do_not_specialize=["kv_len", "blocks", "n_kv", "q_tiles"])
def write_rows(
    KINDS, KV_FOUND, COUNTS, STEPS, kv_len, blocks, n_kv, q_tiles,
    FROM_THE_END: tl.constexpr, CONSUMERS: tl.constexpr, BLOCK_KV: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes the forward's tile schedule of each q tile, as `table_tile_schedule.forward_packed_tiles`.

    One program per (table, q tile).  KINDS: int8 [tables, n_kv, blocks], of row blocks; KV_FOUND: as `seen` writes it.
    A q tile is CONSUMERS row blocks; FROM_THE_END: the first q tile has the last row blocks.  COUNTS: int32 [tables,
    q_tiles], the number of steps, at least 1; STEPS: int32 [tables, q_tiles, n_kv].
    """
    table = tl.program_id(0).to(tl.int64)
    q_tile = tl.program_id(1)
    kinds = KINDS + table * n_kv * blocks
    found = KV_FOUND + table * kv_len
    first_block = q_tile * CONSUMERS
    if FROM_THE_END:
        first_block = blocks - (q_tile + 1) * CONSUMERS
    blind = 0  # what the first packed tile id gives to row blocks that see nothing
    for c in tl.static_range(CONSUMERS):
        most = 0
        for first in range(0, n_kv, COLUMNS):
            kv = n_kv - 1 - first - tl.arange(0, COLUMNS)
            most = tl.maximum(most, tl.max(_kinds_of(kinds, first_block + c, kv, blocks, n_kv), 0))
        blind |= tl.where(most == EMPTY, PARTIAL, 0) << (FORWARD_TILE_BITS + 2 * c)
    steps = STEPS + (table * q_tiles + q_tile) * n_kv
    count = 0
    for first in range(0, n_kv, COLUMNS):
        kv = n_kv - 1 - first - tl.arange(0, COLUMNS)
        packed_tile = tl.zeros([COLUMNS], tl.int32)
        for c in tl.static_range(CONSUMERS):
            packed_tile |= _kinds_of(kinds, first_block + c, kv, blocks, n_kv) << (FORWARD_TILE_BITS + 2 * c)
        listed = packed_tile != 0
        at = count + tl.cumsum(listed.to(tl.int32), 0) - 1
        unseen = _lacks_partners(found, kv, listed, kv_len, BLOCK_KV).to(tl.int32)
        packed_tile = packed_tile | kv | (unseen << FORWARD_UNSEEN) | tl.where(at == 0, blind, 0)
        tl.store(steps + at, packed_tile, mask=listed)
        count += tl.sum(listed.to(tl.int32), 0)
    if count == 0:
        last = n_kv - 1 + tl.arange(0, 1)
        unseen = _lacks_partners(found, last, last == last, kv_len, BLOCK_KV).to(tl.int32)
        tl.store(steps + tl.arange(0, 1), blind | last | (unseen << FORWARD_UNSEEN))
    tl.store(COUNTS + table * q_tiles + q_tile, tl.maximum(count, 1))
