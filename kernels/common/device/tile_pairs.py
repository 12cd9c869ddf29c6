"""Classifies tile pairs as empty, partial or full on the device, for masks that are data.

The kernels evaluate the forms (device encodings, `relations.form`) of a mask's relations one by one.  `seen` finds the
queries that see any key, and the keys that any query sees.  `classify` computes the kind of every tile pair, as
`schedule.visibility` defines it.  `write_seen` replaces `classify` where a forward reads a dense mask as bits: it
writes these bits as well as the kinds.  `unite_kinds` computes the kinds for larger tiles from those for smaller ones.

Only integers are computed, no program reads what another one of the same kernel writes, and whatever belongs to a batch
element is computed from its own data.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....schedule import visibility
from .relations.form import FAR, HIDDEN, Form, Side
from .segment_ids import next_tile, range_of

EMPTY, PARTIAL, FULL = (tl.constexpr(kind) for kind in (visibility.EMPTY, visibility.PARTIAL, visibility.FULL))


class Mask(NamedTuple):
    """The properties of a mask, as compile-time constants.

    HAS_LO, HAS_HI: whether the band has the bound; FORMS, Q_ROWS, KV_ROWS, QUERIES, KEYS: as in
    `common.relations.Layout`; HAS_SEGMENT_IDS: the first form is segment ids; HAS_RANGES: a form `is_range`;
    HAS_OTHERS: there are forms other than segment ids; HAS_DENSE: there is a dense mask; TURNED: queries and
    keys have swapped roles, so that keys search for the queries that see them.
    """

    HAS_LO: bool
    HAS_HI: bool
    FORMS: tuple[Form, ...]
    Q_ROWS: tuple[int, ...]
    KV_ROWS: tuple[int, ...]
    QUERIES: int
    KEYS: int
    HAS_SEGMENT_IDS: bool
    HAS_RANGES: bool
    HAS_OTHERS: bool
    HAS_DENSE: bool
    TURNED: bool = False


class Pairs(NamedTuple):
    """Block sizes of `classify`: tile sizes, tiles per program, and rows that it reads at once."""

    BLOCK_Q: int
    BLOCK_KV: int
    Q_TILES: int
    KV_TILES: int
    LINES: int


class Dense(NamedTuple):
    """A dense mask of one head: pointer to its first element, and the strides of rows and of columns."""

    start: object
    row: object
    column: object


@triton.jit
def _in_band(d, band, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Returns whether ``lo <= d <= hi``, for the bounds that exist; band: (lo, hi)."""
    inside = d == d
    if HAS_LO:
        inside = inside & (d >= band[0])
    if HAS_HI:
        inside = inside & (d <= band[1])
    return inside


@triton.jit
def _along(vectors, AXIS: tl.constexpr):
    """Returns vectors [tokens] as [tokens, 1] (AXIS 0) or [1, tokens] (AXIS 1), so that they broadcast to pairs."""
    found = ()
    for i in tl.static_range(len(vectors)):
        if AXIS == 0:
            found = found + (vectors[i][:, None],)
        else:
            found = found + (vectors[i][None, :],)
    return found


@triton.jit
def _of_side(side, tokens, exists, OF_QUERIES: tl.constexpr, MASK: tl.constexpr):
    """Loads the vectors of queries or keys that each form reads: a tuple of tuples."""
    found = ()
    for i in tl.static_range(len(MASK.FORMS)):
        if OF_QUERIES:
            found = found + (MASK.FORMS[i].load_queries(side, MASK.Q_ROWS[i], tokens, exists),)
        else:
            found = found + (MASK.FORMS[i].load_keys(side, MASK.KV_ROWS[i], tokens, exists),)
    return found


@triton.jit
def _partners_in_tile(other, found, tokens, own, inside, others, dense, band, MASK: tl.constexpr, TOKENS: tl.constexpr):
    """Sets `found` (int32 per token) to 1 where a token of tile `other` of the other side is a partner.

    own: what each form reads of the tokens, by `_of_side`.
    """
    for part in range(0, TOKENS.BLOCK, TOKENS.PARTNERS):
        j = other * TOKENS.BLOCK + part + tl.arange(0, TOKENS.PARTNERS)
        keep = (j < others.length)[:, None] & inside[None, :]
        keep = keep & _in_band(tokens[None, :] - j[:, None], band, MASK.HAS_LO, MASK.HAS_HI)
        theirs = _of_side(others, j, j < others.length, MASK.TURNED, MASK)
        for i in tl.static_range(len(MASK.FORMS)):
            if MASK.TURNED:
                keep = MASK.FORMS[i].test(keep, _along(theirs[i], 0), _along(own[i], 1))
            else:
                keep = MASK.FORMS[i].test(keep, _along(own[i], 1), _along(theirs[i], 0))
        if MASK.HAS_DENSE:
            at = tokens.to(tl.int64)[None, :] * dense.row + j.to(tl.int64)[:, None] * dense.column
            keep = keep & (tl.load(dense.start + at, mask=keep, other=0) != 0)
        found = tl.maximum(found, tl.max(keep.to(tl.int32), 0))
    return found


@triton.jit
def _look_for_partners(
    tile, side, others, RANGES, dense, FOUND, band, MASK: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Computes `seen` for a tile of BLOCK tokens of one head and side; RANGES: segment id ranges of the other side's
    tiles.

    Tiles are visited in order, skipping those whose segment ids cannot include one that still lacks a partner.  With a
    dense mask or an interval the tile at the same index comes first, because under most masks it has a partner for
    every token.
    """
    BLOCK: tl.constexpr = TOKENS.BLOCK
    TILES: tl.constexpr = TOKENS.TILES
    lo, hi = band
    tokens = tile * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < side.length
    own = _of_side(side, tokens, inside, not MASK.TURNED, MASK)
    begin = 0
    end = others.length
    if MASK.HAS_RANGES and not MASK.TURNED:
        for i in tl.static_range(len(MASK.FORMS)):
            if MASK.FORMS[i].is_range:
                begin = tl.maximum(begin, tl.min(own[i][0], 0))
                end = tl.minimum(end, tl.max(own[i][1], 0))
    elif MASK.HAS_HI:
        begin = tl.maximum(tile * BLOCK - hi, 0)
    if MASK.HAS_LO:
        end = tl.maximum(tl.minimum(end, tl.minimum(tile * BLOCK + BLOCK, side.length) - lo), 0)
    segment_ids = tl.zeros([BLOCK], tl.int32)
    if MASK.HAS_SEGMENT_IDS:
        segment_ids = own[0][0]
    found = tl.zeros([BLOCK], tl.int32)
    first_tile = begin // BLOCK
    number = tl.cdiv(end, BLOCK)
    if (MASK.HAS_DENSE or MASK.HAS_OTHERS) and (first_tile <= tile) & (tile < number):
        found = _partners_in_tile(tile, found, tokens, own, inside, others, dense, band, MASK, TOKENS)
    smallest, largest = range_of(segment_ids, inside & (segment_ids >= 0) & (found == 0))
    for first in range(first_tile // TILES * TILES, number, TILES):
        tiles = first + tl.arange(0, TILES)
        low = tl.zeros([TILES], tl.int32)
        high = tl.zeros([TILES], tl.int32)
        if MASK.HAS_SEGMENT_IDS:
            low = tl.load(RANGES + tiles * 2, mask=tiles < number, other=FAR)
            high = tl.load(RANGES + tiles * 2 + 1, mask=tiles < number, other=HIDDEN)
        other = next_tile(tiles, low, high, first_tile - 1, smallest, largest)
        while other < number:
            found = _partners_in_tile(other, found, tokens, own, inside, others, dense, band, MASK, TOKENS)
            smallest, largest = range_of(segment_ids, inside & (segment_ids >= 0) & (found == 0))
            other = next_tile(tiles, low, high, other, smallest, largest)
    tl.store(FOUND + tokens, found != 0, mask=inside)


@triton.jit
def _sides(Q_VECTORS, KV_VECTORS, b, q_len, kv_len, MASK: tl.constexpr):
    """The queries and the keys of a batch element."""
    return Side(Q_VECTORS + b * (MASK.QUERIES * q_len), q_len), Side(KV_VECTORS + b * (MASK.KEYS * kv_len), kv_len)


@triton.jit(do_not_specialize=["heads", "q_len", "kv_len", "lo", "hi"])
def seen(
    Q_VECTORS, KV_VECTORS, RANGES, DENSE, Q_FOUND, KV_FOUND, dense_b, dense_h, dense_i, dense_j, heads,
    q_len, kv_len, lo, hi, MASK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Finds the queries that see any key, and the keys that any query sees, under a mask that reads tensors.

    One program per (batch element and head, BLOCK queries or keys).  Q_FOUND: bool [batch * heads, q_len], whether the
    query sees any key; KV_FOUND: bool [batch * heads, kv_len], whether any query sees the key; both are written.
    Q_VECTORS, KV_VECTORS: as in `MaskTables`.  RANGES: int32 [batch, q and kv tiles of BLOCK tokens, 2], the smallest
    and largest first segment id of each, as `first_equal` writes them.  DENSE: a bool mask [batch, heads, q_len,
    kv_len] with its strides; heads: of DENSE, 1 without.  lo, hi: the bounds of the band.
    """
    head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b = head // heads
    queries, keys = _sides(Q_VECTORS, KV_VECTORS, b, q_len, kv_len, MASK)
    ranges = RANGES + b * tl.num_programs(1) * 2
    dense = DENSE + b * dense_b + head % heads * dense_h
    q_tiles = tl.cdiv(q_len, TOKENS.BLOCK)
    if tile < q_tiles:
        of_rows = Dense(dense, dense_i, dense_j)
        _look_for_partners(
            tile, queries, keys, ranges + q_tiles * 2, of_rows, Q_FOUND + head * q_len, (lo, hi), MASK, TOKENS
        )
    else:
        of_columns = Dense(dense, dense_j, dense_i)
        TURNED: tl.constexpr = Mask(
            MASK.HAS_HI,
            MASK.HAS_LO,
            MASK.FORMS,
            MASK.Q_ROWS,
            MASK.KV_ROWS,
            MASK.QUERIES,
            MASK.KEYS,
            MASK.HAS_SEGMENT_IDS,
            MASK.HAS_RANGES,
            MASK.HAS_OTHERS,
            MASK.HAS_DENSE,
            True,
        )
        _look_for_partners(
            tile - q_tiles, keys, queries, ranges, of_columns, KV_FOUND + head * kv_len, (-hi, -lo), TURNED, TOKENS
        )


@triton.jit
def _kind_of_pair(q, kv, queries, keys, dense, band, MASK: tl.constexpr, PAIRS: tl.constexpr):
    """Returns the kind of one tile pair from its elements, reading LINES rows at a time until it is known."""
    columns = kv * PAIRS.BLOCK_KV + tl.arange(0, PAIRS.BLOCK_KV)
    there = columns < keys.length
    of_columns = _of_side(keys, columns, there, False, MASK)
    row = q * PAIRS.BLOCK_Q
    end = tl.minimum(row + PAIRS.BLOCK_Q, queries.length)
    visible = 0
    looked_at = 0
    while (row < end) & ((visible == 0) | (visible == looked_at)):
        rows = row + tl.arange(0, PAIRS.LINES)
        keep = (rows < end)[:, None] & there[None, :]
        keep = keep & _in_band(rows[:, None] - columns[None, :], band, MASK.HAS_LO, MASK.HAS_HI)
        of_rows = _of_side(queries, rows, rows < end, True, MASK)
        for i in tl.static_range(len(MASK.FORMS)):
            keep = MASK.FORMS[i].test(keep, _along(of_rows[i], 0), _along(of_columns[i], 1))
        if MASK.HAS_DENSE:
            at = rows.to(tl.int64)[:, None] * dense.row + columns.to(tl.int64)[None, :] * dense.column
            keep = keep & (tl.load(dense.start + at, mask=keep, other=0) != 0)
        visible += tl.sum(keep.to(tl.int32), None)
        looked_at += tl.minimum(PAIRS.LINES, end - row) * PAIRS.BLOCK_KV
        row += PAIRS.LINES
    return tl.where(visible == 0, EMPTY, tl.where(visible == looked_at, FULL, PARTIAL))


@triton.jit(do_not_specialize=["heads", "q_len", "kv_len", "lo", "hi", "n_q", "n_kv"])
def classify(
    KINDS, Q_VECTORS, KV_VECTORS, DENSE, dense_b, dense_h, dense_i, dense_j, heads, q_len, kv_len, lo, hi,
    n_q, n_kv, MASK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Writes the kind of each tile pair; one program per (batch element and head, Q_TILES q tiles, KV_TILES kv tiles).

    KINDS: int8 [batch * heads, n_kv, n_q], EMPTY, PARTIAL or FULL; FULL only if the kv tile lies within kv_len.  The
    other arguments are those of `seen`.  Elements are read, LINES rows at a time, only where the band and
    `Form.classify` do not decide.
    """
    BLOCK_Q: tl.constexpr = PAIRS.BLOCK_Q
    BLOCK_KV: tl.constexpr = PAIRS.BLOCK_KV
    Q_TILES: tl.constexpr = PAIRS.Q_TILES
    KV_TILES: tl.constexpr = PAIRS.KV_TILES
    head = tl.program_id(0).to(tl.int64)
    b = head // heads
    first_q, first_kv = tl.program_id(1) * Q_TILES, tl.program_id(2) * KV_TILES
    queries, keys = _sides(Q_VECTORS, KV_VECTORS, b, q_len, kv_len, MASK)
    dense = Dense(DENSE + b * dense_b + head % heads * dense_h, dense_i, dense_j)
    band = lo, hi
    q = first_q + tl.arange(0, Q_TILES)
    kv = first_kv + tl.arange(0, KV_TILES)
    first_row = (q * BLOCK_Q)[None, :]
    first_key = (kv * BLOCK_KV)[:, None]
    lowest = first_row - (tl.minimum(first_key + BLOCK_KV, kv_len) - 1)
    highest = tl.minimum(first_row + BLOCK_Q, q_len) - 1 - first_key
    exists = (q < n_q)[None, :] & (kv < n_kv)[:, None]
    nowhere = exists == 0
    if MASK.HAS_LO:
        nowhere = nowhere | (highest < lo)
    if MASK.HAS_HI:
        nowhere = nowhere | (lowest > hi)
    decided = nowhere
    kinds = tl.zeros([KV_TILES, Q_TILES], tl.int32) + EMPTY
    rows = (q * BLOCK_Q)[:, None] + tl.arange(0, BLOCK_Q)[None, :]
    of_rows = _of_side(queries, rows, rows < q_len, True, MASK)
    columns = (kv * BLOCK_KV)[:, None] + tl.arange(0, BLOCK_KV)[None, :]
    of_columns = _of_side(keys, columns, columns < kv_len, False, MASK)
    within = _in_band(lowest, band, MASK.HAS_LO, MASK.HAS_HI) & _in_band(highest, band, MASK.HAS_LO, MASK.HAS_HI)
    for i in tl.static_range(len(MASK.FORMS)):
        apart, shown, some = MASK.FORMS[i].classify(of_rows[i], rows < q_len, of_columns[i], columns < kv_len)
        nowhere = nowhere | apart
        if not MASK.FORMS[i].is_range:  # which the band is in
            some = some & within
        if i == 0:
            known = shown | some
            all_shown = shown
        else:
            known = (known & shown) | (all_shown & some)
            all_shown = all_shown & shown
    if MASK.HAS_DENSE:
        decided = nowhere
    elif len(MASK.FORMS) > 0:
        kinds = tl.where(all_shown & within & (first_key + BLOCK_KV <= kv_len), FULL, PARTIAL)
        kinds = tl.where(nowhere, EMPTY, kinds)
        decided = nowhere | known
    pairs = tl.arange(0, KV_TILES)[:, None] * Q_TILES + tl.arange(0, Q_TILES)[None, :]
    pair = tl.min(tl.where(decided, FAR, pairs), None)
    while pair < KV_TILES * Q_TILES:
        q_tile, kv_tile = first_q + pair % Q_TILES, first_kv + pair // Q_TILES
        kind = _kind_of_pair(q_tile, kv_tile, queries, keys, dense, band, MASK, PAIRS)
        kinds = tl.where(pairs == pair, kind, kinds)
        pair = tl.min(tl.where(decided | (pairs <= pair), FAR, pairs), None)
    tl.store(KINDS + (head * n_kv + kv[:, None]) * n_q + q[None, :], kinds.to(tl.int8), mask=exists)


@triton.jit(do_not_specialize=["heads", "q_len", "kv_len", "lo", "hi"])
def write_seen(
    KINDS, SEEN_BITS, Q_VECTORS, KV_VECTORS, DENSE, dense_b, dense_h, dense_i, dense_j, heads, q_len, kv_len, lo, hi,
    MASK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Writes the bits of a dense mask that a forward reads, and the kinds of its tile pairs.

    One program per (batch element and head, row block, kv tile).  KINDS: as in `classify`; SEEN_BITS: int32 [batch *
    heads, row blocks, kv tiles, 2 * BLOCK_Q, WORDS], see Note [Seen bits] in schedule/table_tile_schedule.py.  The
    other arguments are those of `seen`.

    Each word is put together bit by bit, from single elements: Triton 3.6 compiles the sum of a permuted tile to other
    words than the interpreter's.
    """
    head = tl.program_id(0).to(tl.int64)
    b = head // heads
    q, kv = tl.program_id(1), tl.program_id(2)
    first_row, first_key = q * BLOCK_Q, kv * BLOCK_KV
    queries, keys = _sides(Q_VECTORS, KV_VECTORS, b, q_len, kv_len, MASK)
    dense = DENSE + b * dense_b + head % heads * dense_h
    NUMBER: tl.constexpr = BLOCK_KV // WORDS // 2
    place = tl.arange(0, 2 * BLOCK_Q * WORDS)
    thread = place // WORDS
    row = first_row + thread // 32 * 16 + thread % 32 // 4
    key = first_key + place % WORDS * (2 * NUMBER) + thread % 4 * 2
    words = tl.zeros([2 * BLOCK_Q * WORDS], tl.int32)
    visible = tl.zeros([2 * BLOCK_Q * WORDS], tl.int32)
    for bit in tl.static_range(NUMBER):
        i = row + bit // 2 % 2 * 8
        j = key + bit // 4 * 8 + bit % 2
        keep = _seen_pairs(i, j, queries, keys, (dense, dense_i, dense_j), q_len, kv_len, (lo, hi), MASK)
        words = words | (keep << bit)
        visible += keep
    seen = tl.sum(visible, 0)
    complete = tl.minimum(BLOCK_Q, q_len - first_row) * BLOCK_KV
    kind = tl.where(seen == 0, EMPTY, tl.where(seen == complete, FULL, PARTIAL))
    tl.store(KINDS + (head * tl.num_programs(2) + kv) * tl.num_programs(1) + q, kind.to(tl.int8))
    pair = (head * tl.num_programs(1) + q) * tl.num_programs(2) + kv
    tl.store(SEEN_BITS + pair * (2 * BLOCK_Q * WORDS) + place, words)


@triton.jit
def _seen_pairs(i, j, queries, keys, dense, q_len, kv_len, bounds, MASK: tl.constexpr):
    """Returns int32: 1 where query i sees key j; dense: (pointer, strides of queries and of keys)."""
    allowed = (i < q_len) & (j < kv_len) & _in_band(i - j, bounds, MASK.HAS_LO, MASK.HAS_HI)
    of_row, of_column = _of_side(queries, i, i < q_len, True, MASK), _of_side(keys, j, j < kv_len, False, MASK)
    for f in tl.static_range(len(MASK.FORMS)):
        allowed = MASK.FORMS[f].test(allowed, of_row[f], of_column[f])
    at = i.to(tl.int64) * dense[1] + j.to(tl.int64) * dense[2]
    return (tl.load(dense[0] + at, mask=allowed, other=0) != 0).to(tl.int32)


@triton.jit(do_not_specialize=["q_len", "kv_len", "lo", "hi"])
def write_backward_bits(
    KINDS, BITS, Q_VECTORS, KV_VECTORS, DENSE, dense_b, dense_h, dense_i, dense_j, heads, q_len, kv_len, lo, hi,
    MASK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, WORDS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Writes the bits of a dense mask that a backward reads, for the tile pairs that the mask cuts.

    One program per (batch element and head, q tile, kv tile).  KINDS: int8 [batch * heads, kv tiles, q tiles]; BITS:
    int32 [batch * heads, kv tiles, q tiles, WORDS, THREADS], see Note [Seen bits] in schedule/table_tile_schedule.py.
    The other arguments are those of `seen`.
    """
    head = tl.program_id(0).to(tl.int64)
    q, kv = tl.program_id(1), tl.program_id(2)
    pair = (head * tl.num_programs(2) + kv) * tl.num_programs(1) + q
    if tl.load(KINDS + pair) == PARTIAL:
        b = head // heads
        queries, keys = _sides(Q_VECTORS, KV_VECTORS, b, q_len, kv_len, MASK)
        dense = DENSE + b * dense_b + head % heads * dense_h
        ALONG_ROWS: tl.constexpr = min(THREADS // 32, BLOCK_KV // 16)
        COLUMNS: tl.constexpr = BLOCK_Q * 32 * ALONG_ROWS // THREADS
        NUMBER: tl.constexpr = BLOCK_Q * BLOCK_KV // THREADS // WORDS
        place = tl.arange(0, WORDS * THREADS)
        warp = place % THREADS // 32
        key = kv * BLOCK_KV + warp % ALONG_ROWS * 16 + place % 32 // 4
        query = q * BLOCK_Q + warp // ALONG_ROWS * COLUMNS + place // THREADS * (2 * NUMBER) + place % 4 * 2
        words = tl.zeros([WORDS * THREADS], tl.int32)
        for bit in tl.static_range(NUMBER):
            i, j = query + bit // 4 * 8 + bit % 2, key + bit // 2 % 2 * 8
            keep = _seen_pairs(i, j, queries, keys, (dense, dense_i, dense_j), q_len, kv_len, (lo, hi), MASK)
            words = words | (keep << bit)
        tl.store(BITS + pair * (WORDS * THREADS) + place, words)


@triton.jit(do_not_specialize=["kv_len", "fine_q", "fine_kv", "n_q", "n_kv"])
def unite_kinds(
    FINE, KINDS, kv_len, fine_q, fine_kv, n_q, n_kv,
    HIGH: tl.constexpr, WIDE: tl.constexpr, BLOCK_KV: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Computes the kinds of coarse tile pairs from those of finer ones.

    One program per (table, kv tile, COLUMNS q tiles).  FINE: int8 [tables, fine_kv, fine_q], KINDS: int8 [tables, n_kv,
    n_q], both with the values of `classify`.  A q tile contains HIGH finer q tiles; a kv tile contains WIDE finer kv
    tiles and BLOCK_KV keys.
    """
    table, kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    seen_by_some = tl.zeros([COLUMNS], tl.int32)
    hidden_from_some = tl.zeros([COLUMNS], tl.int32) + tl.where(kv * BLOCK_KV + BLOCK_KV > kv_len, 1, 0)
    for i in tl.static_range(WIDE):
        for j in tl.static_range(HIGH):
            exists = (kv * WIDE + i < fine_kv) & (q * HIGH + j < fine_q)
            kind = tl.load(FINE + (table * fine_kv + kv * WIDE + i) * fine_q + q * HIGH + j, mask=exists, other=0)
            seen_by_some |= (exists & (kind != EMPTY)).to(tl.int32)
            hidden_from_some |= (exists & (kind != FULL)).to(tl.int32)
    kind = tl.where(seen_by_some == 0, EMPTY, tl.where(hidden_from_some == 0, FULL, PARTIAL))
    tl.store(KINDS + (table * n_kv + kv) * n_q + q, kind.to(tl.int8), mask=q < n_q)
