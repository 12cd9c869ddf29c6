"""From the vectors of a mask to the tables of `schedule.table_walk`, on the device.

Three kernels, one after the other.  `classify` says of every tile pair whether it is empty, partial or full, exactly,
as `schedule.visibility` defines it.  `arrange` has one program per batch element, which counts walks, places and ranks
by Note [Bent fold].  `write` writes the steps of every walk and the tickets.  The forward needs no ranks: after
`classify` with its own tiles, `write_rows` lists the kv tiles of every q tile, and `order_rows` puts the longest first.

Only integers are computed, no program adds to what another one wrote, and whatever belongs to a batch element is
computed from its own vectors; the tickets, which change no bit, are counted over all of them.

The phases of `arrange` hand their results on through global memory.  A barrier of the CTA between them makes what one
thread has stored visible to the others; no other CTA reads it before the kernel ends.
"""

import triton
import triton.language as tl

from ..schedule import table_walk, visibility

EMPTY, PARTIAL, FULL = (tl.constexpr(kind) for kind in (visibility.EMPTY, visibility.PARTIAL, visibility.FULL))
LEAST, LATER = tl.constexpr(table_walk.LEAST), tl.constexpr(table_walk.LATER)
TILE_BITS = tl.constexpr(table_walk.TILE_BITS)
LOW = tl.constexpr((1 << table_walk.TILE_BITS) - 1)
"""The bits of a rank, where it is the lowest field."""
FIELD = tl.constexpr(table_walk.TILE_BITS + 1)
"""Bits of a count of tiles: one more than of a tile."""
PHASE, PRIORITY = (tl.constexpr(fields * (table_walk.TILE_BITS + 1)) for fields in (3, 2))
"""Where the phase begins in a key, and the first number after it."""
LAST = tl.constexpr((1 << (table_walk.TILE_BITS + 1)) - 1)
MASKED = tl.constexpr(1 << (2 * table_walk.TILE_BITS))
"""The flag of a step that needs the mask."""
FAR = tl.constexpr(2**62)


@triton.jit
def _in_band(d, lo, hi, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Whether ``lo <= d <= hi``, as far as there are bounds."""
    inside = d == d
    if HAS_LO:
        inside = inside & (d >= lo)
    if HAS_HI:
        inside = inside & (d <= hi)
    return inside


@triton.jit(do_not_specialize=["q_len", "kv_len", "lo", "hi", "n_q", "n_kv"])
def classify(
    KINDS, VALID, Q_IDS, KV_IDS, valid_b, valid_j, q_ids_b, q_ids_i, kv_ids_b, kv_ids_j,
    q_len, kv_len, lo, hi, n_q, n_kv,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, Q_TILES: tl.constexpr,
):  # fmt: skip
    """One program per (batch element, Q_TILES q tiles, kv tile).

    KINDS: int8 [batch, n_kv, n_q], EMPTY, PARTIAL or FULL.  VALID: bool or uint8 [batch, kv_len]; Q_IDS, KV_IDS: any
    integers [batch, q_len], [batch, kv_len]; each with its strides; lo, hi: the band, anchored top left.

    Where the band and the smallest and largest ids decide for all the tile pairs of a program, no pair of elements is
    looked at.
    """
    b = tl.program_id(0).to(tl.int64)
    first_q = tl.program_id(1) * Q_TILES
    kv = tl.program_id(2)
    keys = kv * BLOCK_KV + tl.arange(0, BLOCK_KV)
    there = keys < kv_len
    if HAS_KEYS:
        there = there & (tl.load(VALID + b * valid_b + keys.to(tl.int64) * valid_j, mask=there, other=0) != 0)
    tiles = first_q + tl.arange(0, Q_TILES)
    first_row = first_q * BLOCK_Q
    last_row = tl.minimum((first_q + Q_TILES) * BLOCK_Q, q_len) - 1
    last_key = tl.minimum((kv + 1) * BLOCK_KV, kv_len) - 1
    lowest = first_row - last_key
    highest = last_row - kv * BLOCK_KV
    everywhere = _in_band(lowest, lo, hi, HAS_LO, HAS_HI) & _in_band(highest, lo, hi, HAS_LO, HAS_HI)
    everywhere = everywhere & (tl.min(there.to(tl.int32), 0) == 1)
    nowhere = tl.max(there.to(tl.int32), 0) == 0
    if HAS_LO:
        nowhere = nowhere | (highest < lo)
    if HAS_HI:
        nowhere = nowhere | (lowest > hi)
    kv_ids = keys
    if HAS_SEGMENTS:
        kv_ids = tl.load(KV_IDS + b * kv_ids_b + keys.to(tl.int64) * kv_ids_j, mask=there, other=0)
        rows = tiles[:, None] * BLOCK_Q + tl.arange(0, BLOCK_Q)[None, :]
        at = Q_IDS + b * q_ids_b + rows.to(tl.int64) * q_ids_i
        q_ids = tl.load(at, mask=rows < q_len, other=0).to(tl.int64)
        smallest = tl.min(tl.min(tl.where(rows < q_len, q_ids, FAR), 1), 0)
        largest = tl.max(tl.max(tl.where(rows < q_len, q_ids, -FAR), 1), 0)
        kv_smallest = tl.min(tl.where(there, kv_ids.to(tl.int64), FAR), 0)
        kv_largest = tl.max(tl.where(there, kv_ids.to(tl.int64), -FAR), 0)
        nowhere = nowhere | (largest < kv_smallest) | (kv_largest < smallest)
        one = (smallest == largest) & (kv_smallest == kv_largest) & (smallest == kv_smallest)
        everywhere = everywhere & one
    kinds = tl.where(everywhere, FULL, EMPTY) + tl.zeros([Q_TILES], tl.int32)
    if (not nowhere) & (not everywhere):
        seen = tl.zeros([Q_TILES, BLOCK_KV], tl.int1)
        hidden = tl.zeros([Q_TILES, BLOCK_KV], tl.int1)
        for i in range(BLOCK_Q):
            row = tiles * BLOCK_Q + i
            real = row < q_len
            keep = there[None, :] & _in_band(row[:, None] - keys[None, :], lo, hi, HAS_LO, HAS_HI)
            if HAS_SEGMENTS:
                ids = tl.load(Q_IDS + b * q_ids_b + row.to(tl.int64) * q_ids_i, mask=real, other=0)
                keep = keep & (ids[:, None] == kv_ids[None, :])
            seen = seen | (real[:, None] & keep)
            hidden = hidden | (real[:, None] & (keep == 0))
        some = tl.max(seen.to(tl.int32), 1) == 1
        all_of_it = tl.max(hidden.to(tl.int32), 1) == 0
        kinds = tl.where(some, tl.where(all_of_it, FULL, PARTIAL), EMPTY)
    tl.store(KINDS + (b * n_kv + kv) * n_q + tiles, kinds.to(tl.int8), mask=tiles < n_q)


@triton.jit
def _seen(kinds, kv, q, n_q, n_kv):
    """1 where q tile q sees kv tile kv, as a tile [len(kv), len(q)] of int32; 0 past the last tiles.

    kinds: of one batch element.
    """
    inside = (kv < n_kv)[:, None] & (q < n_q)[None, :]
    return (tl.load(kinds + kv[:, None] * n_q + q[None, :], mask=inside, other=0) != EMPTY).to(tl.int32)


@triton.jit(do_not_specialize=["n_q", "n_kv"])
def arrange(
    KINDS, BASE, VISITS, CONTRIBUTIONS, KEYS, PLACES, ORDER, LONGEST, RANKS, n_q, n_kv,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per batch element.

    Results: BASE, VISITS: int32 [batch, n_kv]; CONTRIBUTIONS: int32 [batch, n_q].  For `write`: KEYS: int64 [batch,
    n_kv], ascending in launch order, the phase in front; PLACES: int32 [batch, n_kv]; RANKS: int16 [batch, n_kv, n_q],
    of visible pairs.  In between: ORDER: int32 [batch, n_kv]; LONGEST: int32 [batch, n_q].
    """
    b = tl.program_id(0).to(tl.int64)
    kinds, ranks = KINDS + b * n_kv * n_q, RANKS + b * n_kv * n_q
    base, visits, keys, places, order = (
        BASE + b * n_kv, VISITS + b * n_kv, KEYS + b * n_kv, PLACES + b * n_kv, ORDER + b * n_kv
    )  # fmt: skip
    contributions, longest = CONTRIBUTIONS + b * n_q, LONGEST + b * n_q
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)

    total = 0
    for first in range(0, n_kv, ROWS):
        kv = first + row
        n = tl.zeros([ROWS], tl.int32)
        for first_q in range(0, n_q, COLUMNS):
            n += tl.sum(_seen(kinds, kv, first_q + column, n_q, n_kv), 1)
        tl.store(visits + kv, n, mask=kv < n_kv)
        tl.store(base + kv, total + tl.cumsum(n, 0) - n, mask=kv < n_kv)
        total += tl.sum(n, 0)
    tl.debug_barrier()

    for first_q in range(0, n_q, COLUMNS):
        q = first_q + column
        most = tl.zeros([COLUMNS], tl.int32)
        count = tl.zeros([COLUMNS], tl.int32)
        for first in range(0, n_kv, ROWS):
            kv = first + row
            seen = _seen(kinds, kv, q, n_q, n_kv)
            n = tl.load(visits + kv, mask=kv < n_kv, other=0)
            most = tl.maximum(most, tl.max(seen * n[:, None], 0))
            count += tl.sum(seen, 0)
        tl.store(longest + q, most, mask=q < n_q)
        tl.store(contributions + q, count, mask=q < n_q)
    tl.debug_barrier()

    for first in range(0, n_kv, ROWS):
        kv = first + row
        top = tl.zeros([ROWS], tl.int32)
        for first_q in range(0, n_q, COLUMNS):
            q = first_q + column
            most = tl.load(longest + q, mask=q < n_q, other=0)
            top = tl.maximum(top, tl.max(_seen(kinds, kv, q, n_q, n_kv) * most[None, :], 1))
        n = tl.load(visits + kv, mask=kv < n_kv, other=0)
        is_long = (2 * n > top) & (top >= LEAST)
        phase = tl.where(is_long, 0, 1).to(tl.int64)
        second = tl.where(is_long, n, kv).to(tl.int64)
        third = tl.where(is_long, LAST - kv, 0)
        key = (((phase << FIELD) | (LAST - tl.where(is_long, top, n))) << FIELD | second) << FIELD | third
        tl.store(keys + kv, key, mask=kv < n_kv)
    tl.debug_barrier()

    for first in range(0, n_kv, ROWS):
        kv = first + row
        key = tl.load(keys + kv, mask=kv < n_kv, other=FAR)
        place = tl.zeros([ROWS], tl.int32)
        for other in range(0, n_kv, COLUMNS):
            j = other + column
            before = tl.load(keys + j, mask=j < n_kv, other=FAR)[None, :] < key[:, None]
            place += tl.sum(before.to(tl.int32), 1)
        tl.store(places + kv, place, mask=kv < n_kv)
        tl.store(order + place, kv, mask=kv < n_kv)
    tl.debug_barrier()

    for first_q in range(0, n_q, COLUMNS):
        q = first_q + column
        count = tl.zeros([COLUMNS], tl.int32)
        for first in range(0, n_kv, ROWS):
            kv = tl.load(order + first + row, mask=first + row < n_kv, other=n_kv)
            seen = _seen(kinds, kv, q, n_q, n_kv)
            rank = count[None, :] + tl.cumsum(seen, 0) - seen
            inside = (kv < n_kv)[:, None] & (q < n_q)[None, :]
            tl.store(ranks + kv[:, None] * n_q + q[None, :], rank.to(tl.int16), mask=inside)
            count += tl.sum(seen, 0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _write_walk(kinds, ranks, steps, n, n_q, COLUMNS: tl.constexpr):
    """The steps of one kv tile, which n q tiles see: `table_walk.bent`.

    kinds, ranks: of this kv tile; steps: where its walk begins.
    """
    column = tl.arange(0, COLUMNS)
    middle = 3 * n // 4
    a = n * 0
    e = n
    falls = n * 0
    count = n * 0  # q tiles of the list that lie below the block
    last = n * 0  # the last of them and its rank: q + 1 and rank in one number, 0 if there is none
    for first_q in range(0, n_q, COLUMNS):
        q = first_q + column
        seen = tl.load(kinds + q, mask=q < n_q, other=0) != EMPTY
        rank = tl.load(ranks + q, mask=seen, other=0).to(tl.int32)
        below = (q > 0) & (q <= n_q)
        seen_below = tl.load(kinds + q - 1, mask=below, other=0) != EMPTY
        rank_below = tl.load(ranks + q - 1, mask=seen_below, other=0).to(tl.int32)
        marked = tl.where(seen_below, (q << TILE_BITS) | rank_below, 0)
        previous = tl.maximum(tl.associative_scan(marked, 0, _larger), last)
        i = count + tl.cumsum(seen.to(tl.int32), 0) - 1
        rank_before = previous & LOW
        change = seen & (previous > 0) & (rank != rank_before)
        a = tl.maximum(a, tl.max(tl.where(change & (i <= middle), i, 0), 0))
        e = tl.minimum(e, tl.min(tl.where(change & (i > middle), i, n), 0))
        falls = tl.maximum(falls, tl.max((change & (rank < rank_before)).to(tl.int32), 0))
        count += tl.sum(seen.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(marked, 0))
    straight = 4 * (e - a) < n
    a = tl.where((falls == 1) | straight, 0, a)
    e = tl.where(falls == 1, n, tl.where(straight, 0, e))
    count = n * 0
    for first_q in range(0, n_q, COLUMNS):
        q = first_q + column
        kind = tl.load(kinds + q, mask=q < n_q, other=0)
        seen = kind != EMPTY
        rank = tl.load(ranks + q, mask=seen, other=0).to(tl.int32)
        i = count + tl.cumsum(seen.to(tl.int32), 0) - 1
        step = tl.where((i >= a) & (i < e), a + e - 1 - i, i)
        entry = q | (rank << TILE_BITS) | tl.where(kind == PARTIAL, MASKED, 0)
        tl.store(steps + step, entry, mask=seen)
        count += tl.sum(seen.to(tl.int32), 0)


@triton.jit
def _write_tickets(
    KEYS, PLACES, TICKETS, b, kv, batch, heads, n_kv, section, COLUMNS: tl.constexpr, HEADS: tl.constexpr
):
    """The tickets of one kv tile of one batch element: `table_walk.launch_order`."""
    own = tl.load(KEYS + b.to(tl.int64) * n_kv + kv)
    own_place = tl.load(PLACES + b.to(tl.int64) * n_kv + kv)
    own_phase = (own >> PHASE).to(tl.int32)
    own_priority = own >> PRIORITY  # the phase and the first key
    pairs = tl.where(own_phase == 1, LATER * section, section)
    elements = tl.minimum(batch, pairs)
    together = tl.maximum(1, pairs // batch)
    own_group = b // elements
    earlier = b * 0  # rows that are launched before this one's group
    rows = b * 0  # rows of its group and phase
    above = b * 0  # and those among them that are launched before it
    for first in range(0, batch * n_kv, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        inside = at < batch * n_kv
        key = tl.load(KEYS + at, mask=inside, other=FAR)
        place = tl.load(PLACES + at, mask=inside, other=0)
        other = at // n_kv
        phase = (key >> PHASE).to(tl.int32)
        priority = key >> PRIORITY
        same = inside & (phase == own_phase)
        earlier += tl.sum((inside & ((phase < own_phase) | (same & (other // elements < own_group)))).to(tl.int32), 0)
        same = same & (other // elements == own_group)
        rows += tl.sum(same.to(tl.int32), 0)
        tie = (priority == own_priority) & ((place < own_place) | ((place == own_place) & (other < b)))
        above += tl.sum((same & ((priority < own_priority) | tie)).to(tl.int32), 0)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        start = head // together * together
        size = tl.minimum(together, heads - start)
        ticket = earlier * heads + start * rows + above * size + head - start
        tl.store(TICKETS + ticket, (b * heads + head) * n_kv + kv, mask=head < heads)


@triton.jit(do_not_specialize=["batch", "heads", "n_q", "n_kv", "section"])
def write(
    KINDS, BASE, VISITS, KEYS, PLACES, RANKS, STEPS, TICKETS, batch, heads, n_q, n_kv, section,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One program per (batch element, kv tile).

    Results: STEPS: int32 [batch, n_q * n_kv], the walk of kv tile kv from BASE[b, kv] on, as `table_walk.entry`; what
    no walk uses is not written.  TICKETS: int32 [batch * heads * n_kv], (b * heads + head) * n_kv + kv.
    """
    b = tl.program_id(0)
    kv = tl.program_id(1)
    row = b.to(tl.int64) * n_kv + kv
    steps = STEPS + b.to(tl.int64) * n_q * n_kv + tl.load(BASE + row)
    _write_walk(KINDS + row * n_q, RANKS + row * n_q, steps, tl.load(VISITS + row), n_q, COLUMNS)
    _write_tickets(KEYS, PLACES, TICKETS, b, kv, batch, heads, n_kv, section, COLUMNS, HEADS)


@triton.jit(do_not_specialize=["n_q", "n_kv"])
def write_rows(KINDS, VISITS, STEPS, n_q, n_kv, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One program per (batch element, COLUMNS q tiles): the walks of a forward.

    VISITS: int32 [batch, n_q], kv tiles that a q tile sees.  STEPS: int32 [batch, n_q * n_kv], those kv tiles from
    q * n_kv on in ascending order, as `table_walk.entry` of the kv tile and rank 0; what no walk uses is not written.
    """
    b = tl.program_id(0).to(tl.int64)
    q = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kinds = KINDS + b * n_kv * n_q
    steps = STEPS + b * n_kv * n_q
    count = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, n_kv, ROWS):
        kv = first + tl.arange(0, ROWS)
        inside = (kv < n_kv)[:, None] & (q < n_q)[None, :]
        kind = tl.load(kinds + kv[:, None] * n_q + q[None, :], mask=inside, other=0)
        seen = (kind != EMPTY).to(tl.int32)
        step = count[None, :] + tl.cumsum(seen, 0) - 1
        entry = kv[:, None] | tl.where(kind == PARTIAL, MASKED, 0)
        tl.store(steps + q[None, :] * n_kv + step, entry, mask=seen == 1)
        count += tl.sum(seen, 0)
    tl.store(VISITS + b * n_q + q, count, mask=q < n_q)


@triton.jit(do_not_specialize=["n_q"])
def order_rows(VISITS, ORDER, n_q, COLUMNS: tl.constexpr):
    """One program per (batch element, COLUMNS q tiles): `table_walk.longest_first`.

    VISITS: int32 [batch, n_q].  ORDER: int32 [batch, n_q], the q tiles in launch order.
    """
    b = tl.program_id(0).to(tl.int64)
    q = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    length = tl.load(VISITS + b * n_q + q, mask=q < n_q, other=0)
    place = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, n_q, COLUMNS):
        j = first + tl.arange(0, COLUMNS)
        other = tl.load(VISITS + b * n_q + j, mask=j < n_q, other=0)[None, :]
        before = (other > length[:, None]) | ((other == length[:, None]) & (j[None, :] < q[:, None]))
        place += tl.sum((before & (j < n_q)[None, :]).to(tl.int32), 1)
    tl.store(ORDER + b * n_q + place, q, mask=q < n_q)
