"""From the data of a mask to the tables of `schedule.table_walk`, on the device.

`first_equal` turns ids of any integers into *codes*, small integers that are equal where the ids are.  With them every
mask of valid keys and segments is one comparison: a query sees a key iff the band lets it and their codes are equal.
`seen` says which queries see a key, and which keys are seen.  `classify` says of every tile pair whether it is empty,
partial or full, as `schedule.visibility` defines it.  `write_walks` and `count_contributions` make the tables of a
backward of it, `write_rows` those of a forward.

Only integers are computed, no program reads what another one of the same kernel writes, and whatever belongs to a batch
element is computed from its own data.
"""

import triton
import triton.language as tl

from ..schedule import table_walk, visibility

EMPTY, PARTIAL, FULL = (tl.constexpr(kind) for kind in (visibility.EMPTY, visibility.PARTIAL, visibility.FULL))
TILE_BITS = tl.constexpr(table_walk.TILE_BITS)
MASKED = tl.constexpr(table_walk.step_word(0, 0, True))
FORWARD_TILE_BITS = tl.constexpr(table_walk.FORWARD_TILE_BITS)
HIDDEN = tl.constexpr(-1)
"""The code of a key that no query sees by its validity; no query has it."""
ALONE = tl.constexpr(-2)
"""The code of a query whose id no key has; no key has it."""
FAR = tl.constexpr(2**31 - 1)
LOWEST, HIGHEST = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)
"""The smallest and the largest id."""


@triton.jit
def _in_band(d, lo, hi, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Whether ``lo <= d <= hi``, as far as there are bounds."""
    inside = d == d
    if HAS_LO:
        inside = inside & (d >= lo)
    if HAS_HI:
        inside = inside & (d <= hi)
    return inside


@triton.jit(do_not_specialize=["length", "kv_len"])
def first_equal(
    IDS, KV_IDS, VALID, CODES, ids_b, ids_i, kv_ids_b, kv_ids_j, valid_b, valid_j, length, kv_len,
    OF_KEYS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_VALID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (batch element, BLOCK tokens): the code of a token is the first key with the same id.

    IDS: integers [batch, length], those of the keys themselves with OF_KEYS; KV_IDS: integers [batch, kv_len]; VALID:
    bool or uint8 [batch, kv_len]; each with its strides.  CODES: int32 [batch, length].  Without ids the code is 0.
    """
    b = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < length
    code = tl.zeros([BLOCK], tl.int32)
    if HAS_IDS:
        own = tl.load(IDS + b * ids_b + tokens.to(tl.int64) * ids_i, mask=inside, other=0).to(tl.int64)
        smallest = tl.min(tl.where(inside, own, HIGHEST), 0)
        largest = tl.max(tl.where(inside, own, LOWEST), 0)
        code = tl.full([BLOCK], FAR, tl.int32)
        for first in range(0, kv_len, BLOCK):
            j = first + tl.arange(0, BLOCK)
            there = j < kv_len
            ids = tl.load(KV_IDS + b * kv_ids_b + j.to(tl.int64) * kv_ids_j, mask=there, other=0).to(tl.int64)
            below = tl.min(tl.where(there, ids, HIGHEST), 0) <= largest
            above = tl.max(tl.where(there, ids, LOWEST), 0) >= smallest
            if below & above:
                equal = (own[:, None] == ids[None, :]) & there[None, :]
                code = tl.minimum(code, tl.min(tl.where(equal, j[None, :], FAR), 1))
        code = tl.where(code == FAR, ALONE, code)
    if OF_KEYS and HAS_VALID:
        valid = tl.load(VALID + b * valid_b + tokens.to(tl.int64) * valid_j, mask=inside, other=0) != 0
        code = tl.where(valid, code, HIDDEN)
    tl.store(CODES + b * length + tokens, code, mask=inside)


@triton.jit(do_not_specialize=["heads", "length", "other_length", "lo", "hi"])
def seen(
    CODES, OTHERS, DENSE, FOUND, dense_b, dense_h, dense_i, dense_j, heads, length, other_length, lo, hi,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_CODES: tl.constexpr, HAS_DENSE: tl.constexpr, BLOCK: tl.constexpr,
    PARTNERS: tl.constexpr,
):  # fmt: skip
    """One program per (batch element and head, BLOCK tokens): FOUND, whether a token has a partner;
    PARTNERS of them are looked at together.

    CODES, OTHERS: int32 [batch, length], [batch, other_length]; DENSE: bool, with its strides, that of the tokens third
    and that of their partners last; heads: of DENSE, 1 without.  FOUND: bool [batch * heads, length].  A partner lies
    within ``lo <= token - partner <= hi``; for keys these are the negative bounds of the band.
    """
    head = tl.program_id(0).to(tl.int64)
    b = head // heads
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < length
    begin = 0
    end = other_length
    if HAS_HI:
        begin = tl.maximum(tl.program_id(1) * BLOCK - hi, 0) // PARTNERS * PARTNERS
    if HAS_LO:
        end = tl.minimum(end, tl.minimum(tl.program_id(1) * BLOCK + BLOCK, length) - lo)
    own = tokens
    if HAS_CODES:
        own = tl.load(CODES + b * length + tokens, mask=inside, other=ALONE)
    found = tl.zeros([BLOCK], tl.int32)
    missing = tl.sum(inside.to(tl.int32), 0)
    while (begin < end) & (missing > 0):
        j = begin + tl.arange(0, PARTNERS)
        keep = inside[:, None] & (j < other_length)[None, :]
        keep = keep & _in_band(tokens[:, None] - j[None, :], lo, hi, HAS_LO, HAS_HI)
        if HAS_CODES:
            others = tl.load(OTHERS + b * other_length + j, mask=j < other_length, other=HIDDEN)
            keep = keep & (own[:, None] == others[None, :])
        if HAS_DENSE:
            at = b * dense_b + head % heads * dense_h + tokens.to(tl.int64)[:, None] * dense_i
            keep = keep & (tl.load(DENSE + at + j.to(tl.int64)[None, :] * dense_j, mask=keep, other=0) != 0)
        found = tl.maximum(found, tl.max(keep.to(tl.int32), 1))
        missing = tl.sum((inside & (found == 0)).to(tl.int32), 0)
        begin += PARTNERS
    tl.store(FOUND + head * length + tokens, found != 0, mask=inside)


@triton.jit(do_not_specialize=["heads", "q_len", "kv_len", "lo", "hi", "n_q", "n_kv"])
def classify(
    KINDS, Q_CODES, KV_CODES, DENSE, dense_b, dense_h, dense_i, dense_j, heads, q_len, kv_len, lo, hi, n_q, n_kv,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_CODES: tl.constexpr, HAS_DENSE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, Q_TILES: tl.constexpr,
):  # fmt: skip
    """One program per (batch element and head, Q_TILES q tiles, kv tile).

    KINDS: int8 [batch * heads, n_kv, n_q], EMPTY, PARTIAL or FULL; a full one has a complete kv tile.  The other
    arguments are those of `seen`, for queries and keys.  Where band and codes decide for all the tile pairs of a
    program, no pair of elements is looked at.
    """
    head = tl.program_id(0).to(tl.int64)
    b = head // heads
    first_q = tl.program_id(1) * Q_TILES
    kv = tl.program_id(2)
    keys = kv * BLOCK_KV + tl.arange(0, BLOCK_KV)
    there = keys < kv_len
    tiles = first_q + tl.arange(0, Q_TILES)
    first_row = first_q * BLOCK_Q
    last_row = tl.minimum((first_q + Q_TILES) * BLOCK_Q, q_len) - 1
    last_key = tl.minimum((kv + 1) * BLOCK_KV, kv_len) - 1
    lowest = first_row - last_key
    highest = last_row - kv * BLOCK_KV
    everywhere = _in_band(lowest, lo, hi, HAS_LO, HAS_HI) & _in_band(highest, lo, hi, HAS_LO, HAS_HI)
    everywhere = everywhere & (kv * BLOCK_KV + BLOCK_KV <= kv_len)
    nowhere = first_row > last_row
    if HAS_LO:
        nowhere = nowhere | (highest < lo)
    if HAS_HI:
        nowhere = nowhere | (lowest > hi)
    kv_codes = keys
    if HAS_CODES:
        kv_codes = tl.load(KV_CODES + b * kv_len + keys, mask=there, other=HIDDEN)
        rows = tiles[:, None] * BLOCK_Q + tl.arange(0, BLOCK_Q)[None, :]
        q_codes = tl.load(Q_CODES + b * q_len + rows, mask=rows < q_len, other=ALONE)
        smallest = tl.min(tl.min(tl.where(rows < q_len, q_codes, FAR), 1), 0)
        largest = tl.max(tl.max(tl.where(rows < q_len, q_codes, -FAR), 1), 0)
        kv_smallest = tl.min(tl.where(there, kv_codes, FAR), 0)
        kv_largest = tl.max(tl.where(there, kv_codes, -FAR), 0)
        nowhere = nowhere | (largest < kv_smallest) | (kv_largest < smallest)
        everywhere = everywhere & (smallest == largest) & (kv_smallest == kv_largest) & (smallest == kv_smallest)
    if HAS_DENSE:
        everywhere = everywhere & (first_row < 0)  # never: every element has to be looked at
    kinds = tl.where(everywhere, FULL, EMPTY) + tl.zeros([Q_TILES], tl.int32)
    if (not nowhere) & (not everywhere):
        some = tl.zeros([Q_TILES, BLOCK_KV], tl.int32)
        hidden = tl.zeros([Q_TILES, BLOCK_KV], tl.int32)
        for i in range(BLOCK_Q):
            row = tiles * BLOCK_Q + i
            real = row < q_len
            keep = there[None, :] & _in_band(row[:, None] - keys[None, :], lo, hi, HAS_LO, HAS_HI) & real[:, None]
            if HAS_CODES:
                codes = tl.load(Q_CODES + b * q_len + row, mask=real, other=ALONE)
                keep = keep & (codes[:, None] == kv_codes[None, :])
            if HAS_DENSE:
                at = b * dense_b + head % heads * dense_h + row.to(tl.int64)[:, None] * dense_i
                keep = keep & (tl.load(DENSE + at + keys.to(tl.int64)[None, :] * dense_j, mask=keep, other=0) != 0)
            some = tl.maximum(some, keep.to(tl.int32))
            hidden = tl.maximum(hidden, (real[:, None] & (keep == 0)).to(tl.int32))
        whole = tl.max(hidden, 1) == 0
        kinds = tl.where(tl.max(some, 1) == 1, tl.where(whole, FULL, PARTIAL), EMPTY)
    tl.store(KINDS + (head * n_kv + kv) * n_q + tiles, kinds.to(tl.int8), mask=tiles < n_q)


@triton.jit(do_not_specialize=["tables", "heads", "q_len", "kv_len", "lo", "hi", "n_q", "n_kv"])
def write_walks(
    KINDS, VISITS, STEPS, tables, heads, q_len, kv_len, lo, hi, n_q, n_kv,
    WALK_LENGTH: tl.constexpr, Q_TILE: tl.constexpr, RANK: tl.constexpr, GROUP: tl.constexpr, BY_HEAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per (table, kv tile): the walk of a kv tile, by Note [Tables].

    There are `tables` of them for each batch element: one for every query head with BY_HEAD; else the first for most
    heads of the schedule, and a second for those that it mirrors, of which the last is one.  KINDS: as `classify`
    writes them, by head with BY_HEAD.  VISITS: int32 [tables of all, n_kv], steps of a walk.  STEPS: int32 [tables of
    all, n_kv, n_q], as `table_walk.step_word`; what no walk uses is not written.  heads: of the schedule, which are the
    query heads; WALK_LENGTH, Q_TILE, RANK: functions of the schedule.
    """
    table = tl.program_id(0)
    kv = tl.program_id(1)
    place = tl.where(table % tables == 0, 0, heads - 1)
    element = table // tables
    if BY_HEAD:
        q_head = table % tables
        place = q_head % GROUP * (heads // GROUP) + q_head // GROUP
        element = table
    walk = heads, q_len, kv_len, lo, hi
    kinds = KINDS + element.to(tl.int64) * n_kv * n_q
    row = table.to(tl.int64) * n_kv + kv
    length = WALK_LENGTH(place, kv, walk, BLOCK_Q, BLOCK_KV)
    count = 0
    for first in range(0, length, COLUMNS):
        step = first + tl.arange(0, COLUMNS)
        q = Q_TILE(place, kv, step, walk, BLOCK_Q, BLOCK_KV)
        inside = (step < length) & (q >= 0) & (q < n_q)
        kind = tl.load(kinds + kv * n_q + q, mask=inside, other=0)
        visible = inside & (kind != EMPTY)
        own = RANK(place, q, kv, walk, BLOCK_Q, BLOCK_KV)
        rank = tl.zeros([COLUMNS], tl.int32)
        for other in range(n_kv):
            contributes = tl.load(kinds + other * n_q + q, mask=inside, other=0) != EMPTY
            before = RANK(place, q, other, walk, BLOCK_Q, BLOCK_KV) < own
            rank += (contributes & before).to(tl.int32)
        at = count + tl.cumsum(visible.to(tl.int32), 0) - 1
        word = q | (rank << TILE_BITS) | tl.where(kind == PARTIAL, MASKED, 0)
        tl.store(STEPS + row * n_q + at, word, mask=visible)
        count += tl.sum(visible.to(tl.int32), 0)
    tl.store(VISITS + row, count)


@triton.jit(do_not_specialize=["tables", "n_q", "n_kv"])
def count_contributions(
    KINDS, CONTRIBUTIONS, tables, n_q, n_kv, BY_HEAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One program per (table, COLUMNS q tiles).  CONTRIBUTIONS: int32 [tables of all, n_q]: kv tiles that it sees."""
    table = tl.program_id(0)
    q = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    element = table if BY_HEAD else table // tables
    kinds = KINDS + element.to(tl.int64) * n_kv * n_q
    count = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, n_kv, ROWS):
        kv = first + tl.arange(0, ROWS)
        inside = (kv < n_kv)[:, None] & (q < n_q)[None, :]
        kind = tl.load(kinds + kv[:, None] * n_q + q[None, :], mask=inside, other=0)
        count += tl.sum((kind != EMPTY).to(tl.int32), 0)
    tl.store(CONTRIBUTIONS + table.to(tl.int64) * n_q + q, count, mask=q < n_q)


@triton.jit
def _kinds_of(kinds, block, kv, blocks, n_kv):
    """What the kv tiles are to a row block; EMPTY if there is no such row block."""
    inside = (kv >= 0) & (kv < n_kv) & (block >= 0) & (block < blocks)
    return tl.load(kinds + kv * blocks + block, mask=inside, other=0).to(tl.int32)


@triton.jit(do_not_specialize=["blocks", "n_kv", "q_tiles"])
def write_rows(
    KINDS, COUNTS, STEPS, blocks, n_kv, q_tiles,
    FROM_THE_END: tl.constexpr, CONSUMERS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per (table, q tile): the walk of a tile of a forward, as `table_walk.forward_words`.

    KINDS: int8 [tables, n_kv, blocks], of row blocks.  A tile is CONSUMERS row blocks; FROM_THE_END: the last of them
    belong to the first tile.  COUNTS: int32 [tables, q_tiles], at least 1; STEPS: int32 [tables, q_tiles, n_kv].
    """
    table = tl.program_id(0).to(tl.int64)
    q_tile = tl.program_id(1)
    kinds = KINDS + table * n_kv * blocks
    first_block = q_tile * CONSUMERS
    if FROM_THE_END:
        first_block = blocks - (q_tile + 1) * CONSUMERS
    blind = 0  # what the first word gives to row blocks that see nothing
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
        word = tl.zeros([COLUMNS], tl.int32)
        for c in tl.static_range(CONSUMERS):
            word |= _kinds_of(kinds, first_block + c, kv, blocks, n_kv) << (FORWARD_TILE_BITS + 2 * c)
        listed = word != 0
        at = count + tl.cumsum(listed.to(tl.int32), 0) - 1
        word = word | kv | tl.where(at == 0, blind, 0)
        tl.store(steps + at, word, mask=listed)
        count += tl.sum(listed.to(tl.int32), 0)
    if count == 0:
        tl.store(steps, blind | (n_kv - 1))
    tl.store(COUNTS + table * q_tiles + q_tile, tl.maximum(count, 1))
