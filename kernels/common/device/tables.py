"""From the data of a mask to the tables of `schedule.table_walk`, on the device.

`first_equal` turns ids of any integers into *codes*, small integers that are equal where the ids are.  With them every
mask of valid keys and segments is one comparison: a query sees a key iff the band lets it and their codes are equal.
What other relations read is made by torch; `relations` has the tests of all, which the kernels go through one by one.
`seen` says which queries see a key, and which keys are seen.  `classify` says of every tile pair whether it is empty,
partial or full, as `schedule.visibility` defines it; `write_seen` does where a forward reads bits of a dense mask, and
writes them, too.  `unite_kinds` makes the kinds of larger tiles from these.  From the kinds, `rank_contributors` and
`write_walks` make the tables of a backward, and `write_rows` the tables of a forward.

Any ids in any order are allowed, but documents and padding are usual: there, neighbouring tokens have the same id, and
few tiles of tokens have ids in common.  So tiles have *ranges*, their smallest and largest id or code, and only tiles
whose ranges meet are compared token by token.

Only integers are computed, no program reads what another one of the same kernel writes, and whatever belongs to a batch
element is computed from its own data.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....schedule import table_walk, visibility
from .relations import ALONE, FAR, HIDDEN, Side, judges, of_keys, of_queries, shows

EMPTY, PARTIAL, FULL = (tl.constexpr(kind) for kind in (visibility.EMPTY, visibility.PARTIAL, visibility.FULL))
TILE_BITS = tl.constexpr(table_walk.TILE_BITS)
MASKED = tl.constexpr(table_walk.step_word(0, 0, True))
FORWARD_TILE_BITS = tl.constexpr(table_walk.FORWARD_TILE_BITS)
FORWARD_UNSEEN = tl.constexpr(table_walk.FORWARD_UNSEEN)
HAS_BLIND = tl.constexpr(table_walk.step_word(0, 0, False, True))
LOWEST, HIGHEST = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)
"""The smallest and the largest id."""


class Mask(NamedTuple):
    """The bounds of the band, and the data of the mask that there is.

    FORMS, Q_ROWS, KV_ROWS, QUERIES, KEYS: as of `common.relations.Layout`.  HAS_CODES: the first form is codes;
    HAS_POSITIONS: spans are among them; HAS_OTHERS: there are others than codes.  TURNED: keys look for the queries
    that see them.
    """

    HAS_LO: bool
    HAS_HI: bool
    FORMS: tuple[str, ...]
    Q_ROWS: tuple[int, ...]
    KV_ROWS: tuple[int, ...]
    QUERIES: int
    KEYS: int
    HAS_CODES: bool
    HAS_POSITIONS: bool
    HAS_OTHERS: bool
    HAS_DENSE: bool
    TURNED: bool = False


class Tokens(NamedTuple):
    """How programs go over tokens: tiles of BLOCK, of which PARTNERS tokens are compared together; ranges of TILES."""

    BLOCK: int
    PARTNERS: int
    TILES: int


class Pairs(NamedTuple):
    """How `classify` goes over tile pairs: their size, how many a program has, and rows that it looks at together."""

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
    """Whether ``lo <= d <= hi``, as far as there are bounds; band: (lo, hi)."""
    inside = d == d
    if HAS_LO:
        inside = inside & (d >= band[0])
    if HAS_HI:
        inside = inside & (d <= band[1])
    return inside


@triton.jit
def _along(vectors, AXIS: tl.constexpr):
    """Vectors as they broadcast to pairs, along dimension 0 or 1."""
    found = ()
    for i in tl.static_range(len(vectors)):
        if AXIS == 0:
            found = found + (vectors[i][:, None],)
        else:
            found = found + (vectors[i][None, :],)
    return found


@triton.jit
def _of_side(side, tokens, exists, OF_QUERIES: tl.constexpr, MASK: tl.constexpr):
    """The vectors of queries or of keys that each form reads: a tuple of tuples."""
    found = ()
    for i in tl.static_range(len(MASK.FORMS)):
        if OF_QUERIES:
            found = found + (of_queries(side, tokens, exists, MASK, i),)
        else:
            found = found + (of_keys(side, tokens, exists, MASK, i),)
    return found


@triton.jit
def _next_tile(tiles, low, high, after, smallest, largest):
    """The first of `tiles` beyond `after` whose range ``low .. high`` meets ``smallest .. largest``, or FAR."""
    return tl.min(tl.where((tiles > after) & (low <= largest) & (high >= smallest), tiles, FAR), 0)


@triton.jit(do_not_specialize=["kv_len"])
def find_starts(KV_IDS, STARTS, kv_ids_b, kv_ids_j, kv_len, BLOCK: tl.constexpr):
    """One program per (batch element, BLOCK keys): STARTS, the smallest and the largest id with which a run begins.

    A run is of neighbouring keys with the same id; the first key that has an id begins one.  KV_IDS: integers [batch,
    kv_len], with its strides; STARTS: int64 [batch, key tiles, 2], an empty range where no run begins.
    """
    b, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys = tile * BLOCK + tl.arange(0, BLOCK)
    there = keys < kv_len
    ids = KV_IDS + b * kv_ids_b
    own = tl.load(ids + keys.to(tl.int64) * kv_ids_j, mask=there, other=0).to(tl.int64)
    follows = there & (keys > 0)
    left = tl.load(ids + (keys.to(tl.int64) - 1) * kv_ids_j, mask=follows, other=0).to(tl.int64)
    begins = there & ((keys == 0) | (own != left))
    place = STARTS + (b * tl.num_programs(1) + tile) * 2
    tl.store(place, tl.min(tl.where(begins, own, HIGHEST), 0))
    tl.store(place + 1, tl.max(tl.where(begins, own, LOWEST), 0))


@triton.jit
def _first_key(own, inside, KV_IDS, STARTS, kv_ids_j, kv_len, TOKENS: tl.constexpr):
    """int32 [BLOCK]: the first key with each of the ids `own`; ALONE if there is none, anything where not `inside`.

    Tiles are looked at in their order, and only tiles in which a run begins whose id may be one that is not found yet.
    """
    BLOCK: tl.constexpr = TOKENS.BLOCK
    code = tl.full([BLOCK], FAR, tl.int32)
    smallest = tl.min(tl.where(inside, own, HIGHEST), 0)
    largest = tl.max(tl.where(inside, own, LOWEST), 0)
    number = tl.cdiv(kv_len, BLOCK)
    for first in range(0, number, TOKENS.TILES):
        tiles = first + tl.arange(0, TOKENS.TILES)
        low = tl.load(STARTS + tiles * 2, mask=tiles < number, other=HIGHEST)
        high = tl.load(STARTS + tiles * 2 + 1, mask=tiles < number, other=LOWEST)
        tile = _next_tile(tiles, low, high, -1, smallest, largest)
        while tile < number:
            for part in range(0, BLOCK, TOKENS.PARTNERS):
                j = tile * BLOCK + part + tl.arange(0, TOKENS.PARTNERS)
                there = j < kv_len
                ids = tl.load(KV_IDS + j.to(tl.int64) * kv_ids_j, mask=there, other=0).to(tl.int64)
                equal = (ids[:, None] == own[None, :]) & there[:, None]
                code = tl.minimum(code, tl.min(tl.where(equal, j[:, None], FAR), 0))
            missing = inside & (code == FAR)
            smallest = tl.min(tl.where(missing, own, HIGHEST), 0)
            largest = tl.max(tl.where(missing, own, LOWEST), 0)
            tile = _next_tile(tiles, low, high, tile, smallest, largest)
    return tl.where(code == FAR, ALONE, code)


@triton.jit
def _range(code, counted):
    """The smallest and the largest of the codes that are `counted`; FAR and HIDDEN, an empty range, without any."""
    return tl.min(tl.where(counted, code, FAR), 0), tl.max(tl.where(counted, code, HIDDEN), 0)


@triton.jit
def _encode(
    tile, IDS, KV_IDS, STARTS, VALID, CODES, RANGE, ids_i, kv_ids_j, valid_j, length, kv_len,
    HAS_IDS: tl.constexpr, HAS_VALID: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The codes of the BLOCK tokens of a tile, of one batch element and one side; RANGE: the smallest and the largest.

    Codes of tokens that have no partner do not count for the range, which may be empty.
    """
    BLOCK: tl.constexpr = TOKENS.BLOCK
    tokens = tile * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < length
    code = tl.zeros([BLOCK], tl.int32)
    if HAS_IDS:
        own = tl.load(IDS + tokens.to(tl.int64) * ids_i, mask=inside, other=0).to(tl.int64)
        code = _first_key(own, inside, KV_IDS, STARTS, kv_ids_j, kv_len, TOKENS)
    if HAS_VALID:
        valid = tl.load(VALID + tokens.to(tl.int64) * valid_j, mask=inside, other=0) != 0
        code = tl.where(valid, code, HIDDEN)
    tl.store(CODES + tokens, code, mask=inside)
    smallest, largest = _range(code, inside & (code >= 0))
    tl.store(RANGE, smallest)
    tl.store(RANGE + 1, largest)


@triton.jit(do_not_specialize=["q_len", "kv_len"])
def first_equal(
    Q_IDS, KV_IDS, STARTS, VALID, Q_CODES, KV_CODES, RANGES, q_ids_b, q_ids_i, kv_ids_b, kv_ids_j, valid_b, valid_j,
    q_len, kv_len,
    HAS_IDS: tl.constexpr, HAS_VALID: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program per (batch element, BLOCK queries or keys): the code of a token is the first key with the same id.

    Q_IDS, KV_IDS: integers [batch, q_len], [batch, kv_len]; STARTS: as `find_starts` writes it with the same BLOCK;
    VALID: bool or uint8 [batch, kv_len]; all but STARTS with their strides.  Q_CODES, KV_CODES: int32 [batch, q_len],
    [batch, kv_len], each one of QUERIES and of KEYS vectors of a batch element; without ids the code is 0.  RANGES:
    int32 [batch, query tiles and key tiles, 2], see `_encode`.
    """
    b, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_ids = KV_IDS + b * kv_ids_b
    starts = STARTS + b * tl.cdiv(kv_len, TOKENS.BLOCK) * 2
    place = RANGES + (b * tl.num_programs(1) + tile) * 2
    q_tiles = tl.cdiv(q_len, TOKENS.BLOCK)
    if tile < q_tiles:
        _encode(
            tile, Q_IDS + b * q_ids_b, kv_ids, starts, VALID, Q_CODES + b * (QUERIES * q_len), place, q_ids_i,
            kv_ids_j, valid_j, q_len, kv_len, HAS_IDS, False, TOKENS,
        )  # fmt: skip
    else:
        _encode(
            tile - q_tiles, kv_ids, kv_ids, starts, VALID + b * valid_b, KV_CODES + b * (KEYS * kv_len), place,
            kv_ids_j, kv_ids_j, valid_j, kv_len, kv_len, HAS_IDS, HAS_VALID, TOKENS,
        )  # fmt: skip


@triton.jit
def _partners_in_tile(other, found, tokens, own, inside, others, dense, band, MASK: tl.constexpr, TOKENS: tl.constexpr):
    """`found`, int32 of every token, with 1 where a token of tile `other` of the other side is a partner.

    own: what each form reads of the tokens, by `_of_side`.
    """
    for part in range(0, TOKENS.BLOCK, TOKENS.PARTNERS):
        j = other * TOKENS.BLOCK + part + tl.arange(0, TOKENS.PARTNERS)
        keep = (j < others.length)[:, None] & inside[None, :]
        keep = keep & _in_band(tokens[None, :] - j[:, None], band, MASK.HAS_LO, MASK.HAS_HI)
        theirs = _of_side(others, j, j < others.length, MASK.TURNED, MASK)
        for i in tl.static_range(len(MASK.FORMS)):
            if MASK.TURNED:
                keep = shows(keep, _along(theirs[i], 0), _along(own[i], 1), MASK, i)
            else:
                keep = shows(keep, _along(own[i], 1), _along(theirs[i], 0), MASK, i)
        if MASK.HAS_DENSE:
            at = tokens.to(tl.int64)[None, :] * dense.row + j.to(tl.int64)[:, None] * dense.column
            keep = keep & (tl.load(dense.start + at, mask=keep, other=0) != 0)
        found = tl.maximum(found, tl.max(keep.to(tl.int32), 0))
    return found


@triton.jit
def _look_for_partners(
    tile, side, others, RANGES, dense, FOUND, band, MASK: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """`seen` for the BLOCK tokens of a tile, of one head and one side; RANGES: of the tiles of the others.

    Tiles are looked at in their order, and only tiles whose codes may include one without a partner yet.  Under a
    dense mask or an interval the tile at the same place comes first: there most masks have a partner for all.
    """
    BLOCK: tl.constexpr = TOKENS.BLOCK
    TILES: tl.constexpr = TOKENS.TILES
    lo, hi = band
    tokens = tile * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < side.length
    own = _of_side(side, tokens, inside, not MASK.TURNED, MASK)
    begin = 0
    end = others.length
    if MASK.HAS_POSITIONS and not MASK.TURNED:
        for i in tl.static_range(len(MASK.FORMS)):
            if MASK.FORMS[i] == "spans":
                begin = tl.maximum(begin, tl.min(own[i][0], 0))
                end = tl.minimum(end, tl.max(own[i][1], 0))
    elif MASK.HAS_HI:
        begin = tl.maximum(tile * BLOCK - hi, 0)
    if MASK.HAS_LO:
        end = tl.maximum(tl.minimum(end, tl.minimum(tile * BLOCK + BLOCK, side.length) - lo), 0)
    codes = tl.zeros([BLOCK], tl.int32)
    if MASK.HAS_CODES:
        codes = own[0][0]
    found = tl.zeros([BLOCK], tl.int32)
    first_tile = begin // BLOCK
    number = tl.cdiv(end, BLOCK)
    if (MASK.HAS_DENSE or MASK.HAS_OTHERS) and (first_tile <= tile) & (tile < number):
        found = _partners_in_tile(tile, found, tokens, own, inside, others, dense, band, MASK, TOKENS)
    smallest, largest = _range(codes, inside & (codes >= 0) & (found == 0))
    for first in range(first_tile // TILES * TILES, number, TILES):
        tiles = first + tl.arange(0, TILES)
        low = tl.zeros([TILES], tl.int32)
        high = tl.zeros([TILES], tl.int32)
        if MASK.HAS_CODES:
            low = tl.load(RANGES + tiles * 2, mask=tiles < number, other=FAR)
            high = tl.load(RANGES + tiles * 2 + 1, mask=tiles < number, other=HIDDEN)
        other = _next_tile(tiles, low, high, first_tile - 1, smallest, largest)
        while other < number:
            found = _partners_in_tile(other, found, tokens, own, inside, others, dense, band, MASK, TOKENS)
            smallest, largest = _range(codes, inside & (codes >= 0) & (found == 0))
            other = _next_tile(tiles, low, high, other, smallest, largest)
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
    """One program per (batch element and head, BLOCK queries or keys): whether a query sees a key, or a key is seen.

    Q_VECTORS, KV_VECTORS: as of `MaskTables`; RANGES: as `first_equal` writes it with the first codes and the same
    BLOCK; DENSE: bool, with its strides; heads: of DENSE, 1 without.  Q_FOUND, KV_FOUND: bool [batch * heads, q_len],
    [batch * heads, kv_len].
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
            MASK.HAS_CODES,
            MASK.HAS_POSITIONS,
            MASK.HAS_OTHERS,
            MASK.HAS_DENSE,
            True,
        )
        _look_for_partners(
            tile - q_tiles, keys, queries, ranges, of_columns, KV_FOUND + head * kv_len, (-hi, -lo), TURNED, TOKENS
        )


@triton.jit
def _kind_of_pair(q, kv, queries, keys, dense, band, MASK: tl.constexpr, PAIRS: tl.constexpr):
    """The kind of one tile pair, from its elements, LINES rows at a time until it is known."""
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
            keep = shows(keep, _along(of_rows[i], 0), _along(of_columns[i], 1), MASK, i)
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
    """One program per (batch element and head, Q_TILES q tiles, KV_TILES kv tiles).

    KINDS: int8 [batch * heads, n_kv, n_q], EMPTY, PARTIAL or FULL; a full one has a complete kv tile.  The other
    arguments are those of `seen`.  Elements are looked at, LINES rows at a time, where the band and what `judges` says
    of tiles do not decide: the smallest and the largest code of either tile, for example, which existing tokens have.
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
        apart, shown, some = judges(of_rows[i], rows < q_len, of_columns[i], columns < kv_len, MASK, i)
        nowhere = nowhere | apart
        if MASK.HAS_DENSE:
            decided = nowhere
        elif i == 0:
            kinds = tl.where(shown & within & (first_key + BLOCK_KV <= kv_len), FULL, PARTIAL)
            kinds = tl.where(nowhere, EMPTY, kinds)
            decided = nowhere | shown | (within & some)
        else:
            kinds = tl.where(nowhere, EMPTY, kinds)
            decided = nowhere | (decided & shown)
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
    """One program per (batch element and head, row block, kv tile): the bits of a dense mask that a forward reads.

    KINDS: as of `classify`; SEEN_BITS: int32 [batch * heads, row blocks, kv tiles, 2 * BLOCK_Q, WORDS], see Note [Seen
    bits] in schedule/table_walk.py.  The other arguments are those of `seen`.

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
        allowed = (i < q_len) & (j < kv_len) & _in_band(i - j, (lo, hi), MASK.HAS_LO, MASK.HAS_HI)
        of_row, of_column = _of_side(queries, i, i < q_len, True, MASK), _of_side(keys, j, j < kv_len, False, MASK)
        for f in tl.static_range(len(MASK.FORMS)):
            allowed = shows(allowed, of_row[f], of_column[f], MASK, f)
        at = i.to(tl.int64) * dense_i + j.to(tl.int64) * dense_j
        keep = (tl.load(dense + at, mask=allowed, other=0) != 0).to(tl.int32)
        words = words | (keep << bit)
        visible += keep
    seen = tl.sum(visible, 0)
    complete = tl.minimum(BLOCK_Q, q_len - first_row) * BLOCK_KV
    kind = tl.where(seen == 0, EMPTY, tl.where(seen == complete, FULL, PARTIAL))
    tl.store(KINDS + (head * tl.num_programs(2) + kv) * tl.num_programs(1) + q, kind.to(tl.int8))
    pair = (head * tl.num_programs(1) + q) * tl.num_programs(2) + kv
    tl.store(SEEN_BITS + pair * (2 * BLOCK_Q * WORDS) + place, words)


@triton.jit(do_not_specialize=["kv_len", "fine_q", "fine_kv", "n_q", "n_kv"])
def unite_kinds(
    FINE, KINDS, kv_len, fine_q, fine_kv, n_q, n_kv,
    HIGH: tl.constexpr, WIDE: tl.constexpr, BLOCK_KV: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per (table, kv tile, COLUMNS q tiles): kinds of tile pairs from the kinds of finer ones in them.

    FINE: int8 [tables, fine_kv, fine_q], KINDS: int8 [tables, n_kv, n_q], both as of `classify`.  A q tile has HIGH
    finer ones, a kv tile WIDE, and BLOCK_KV keys.
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


@triton.jit(do_not_specialize=["q_len", "kv_len", "lo", "hi", "n_q", "n_kv"])
def rank_contributors(
    KINDS, RANKS, CONTRIBUTIONS, q_len, kv_len, lo, hi, n_q, n_kv,
    RANK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per (table, kv tile or all of them, COLUMNS q tiles): contributors that come before a kv tile.

    KINDS: int8 [tables, n_kv, n_q], as `classify` writes them.  RANKS: int32 [tables, n_kv, n_q], by Note [Tables]; not
    written where a kv tile does not contribute.  CONTRIBUTIONS: int32 [tables, n_q], kv tiles that a q tile sees.  ROWS
    kv tiles are looked at together; RANK: a function of the schedule.
    """
    table = tl.program_id(0).to(tl.int64)
    kinds = KINDS + table * n_kv * n_q
    kv = tl.program_id(1)
    walk = q_len, kv_len, lo, hi
    q = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = q < n_q
    own = tl.zeros([COLUMNS], tl.int32)
    if kv < n_kv:
        wanted = wanted & (tl.load(kinds + kv * n_q + q, mask=wanted, other=0) != EMPTY)
        own += RANK(q, kv, walk, BLOCK_Q, BLOCK_KV)
    if tl.max(wanted.to(tl.int32), 0) > 0:
        count = tl.zeros([COLUMNS], tl.int32)
        for first in range(0, n_kv, ROWS):
            other = first + tl.arange(0, ROWS)[:, None]
            present = wanted[None, :] & (other < n_kv)
            counted = tl.load(kinds + other * n_q + q[None, :], mask=present, other=0) != EMPTY
            before = RANK(q[None, :], other, walk, BLOCK_Q, BLOCK_KV) < own[None, :]
            count += tl.sum((counted & (before | (kv == n_kv))).to(tl.int32), 0)
        if kv < n_kv:
            tl.store(RANKS + (table * n_kv + kv) * n_q + q, count, mask=wanted)
        else:
            tl.store(CONTRIBUTIONS + table * n_q + q, count, mask=wanted)


@triton.jit
def _lacks_partners(FOUND, tiles, wanted, length, BLOCK: tl.constexpr):
    """Whether a token of each of the `tiles` that are `wanted` has no partner; FOUND: a row of `seen`, [length]."""
    tokens = tiles[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    found = tl.load(FOUND + tokens, mask=wanted[:, None] & (tokens < length), other=1)
    return tl.min(found.to(tl.int32), 1) == 0


@triton.jit(do_not_specialize=["q_len", "kv_len", "lo", "hi", "n_q", "n_kv"])
def write_walks(
    KINDS, RANKS, Q_FOUND, VISITS, STEPS, q_len, kv_len, lo, hi, n_q, n_kv,
    WALK_LENGTH: tl.constexpr, Q_TILE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per (table, kv tile): the walk of a kv tile, by Note [Tables], COLUMNS steps at a time.

    KINDS, RANKS: as `rank_contributors` has them; Q_FOUND: as `seen` writes it.  VISITS: int32 [tables, n_kv], steps of
    a walk.  STEPS: int32 [tables, n_kv, n_q], as `table_walk.step_word`; what no walk uses is not written.
    WALK_LENGTH, Q_TILE: functions of the schedule.
    """
    table = tl.program_id(0).to(tl.int64)
    kinds = KINDS + table * n_kv * n_q
    kv = tl.program_id(1)
    walk = q_len, kv_len, lo, hi
    row = table * n_kv + kv
    found = Q_FOUND + table * q_len
    length = WALK_LENGTH(kv, walk, BLOCK_Q, BLOCK_KV)
    count = 0
    for first in range(0, length, COLUMNS):
        step = first + tl.arange(0, COLUMNS)
        q = Q_TILE(kv, step, walk, BLOCK_Q, BLOCK_KV)
        inside = (step < length) & (q >= 0) & (q < n_q)
        kind = tl.load(kinds + kv * n_q + q, mask=inside, other=0)
        visible = inside & (kind != EMPTY)
        rank = tl.load(RANKS + row * n_q + q, mask=visible, other=0)
        at = count + tl.cumsum(visible.to(tl.int32), 0) - 1
        masked = visible & (kind == PARTIAL)
        word = q | (rank << TILE_BITS) | tl.where(masked, MASKED, 0)
        word |= tl.where(_lacks_partners(found, q, masked, q_len, BLOCK_Q), HAS_BLIND, 0)
        tl.store(STEPS + row * n_q + at, word, mask=visible)
        count += tl.sum(visible.to(tl.int32), 0)
    tl.store(VISITS + row, count)


@triton.jit
def _kinds_of(kinds, block, kv, blocks, n_kv):
    """The kinds of the kv tiles for a row block; EMPTY if there is no such row block."""
    inside = (kv >= 0) & (kv < n_kv) & (block >= 0) & (block < blocks)
    return tl.load(kinds + kv * blocks + block, mask=inside, other=0).to(tl.int32)


@triton.jit(do_not_specialize=["kv_len", "blocks", "n_kv", "q_tiles"])
def write_rows(
    KINDS, KV_FOUND, COUNTS, STEPS, kv_len, blocks, n_kv, q_tiles,
    FROM_THE_END: tl.constexpr, CONSUMERS: tl.constexpr, BLOCK_KV: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per (table, q tile): the walk of a tile of a forward, as `table_walk.forward_words`.

    KINDS: int8 [tables, n_kv, blocks], of row blocks; KV_FOUND: as `seen` writes it.  A tile is CONSUMERS row blocks;
    FROM_THE_END: the last of them belong to the first tile.  COUNTS: int32 [tables, q_tiles], at least 1; STEPS: int32
    [tables, q_tiles, n_kv].
    """
    table = tl.program_id(0).to(tl.int64)
    q_tile = tl.program_id(1)
    kinds = KINDS + table * n_kv * blocks
    found = KV_FOUND + table * kv_len
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
        unseen = _lacks_partners(found, kv, listed, kv_len, BLOCK_KV).to(tl.int32)
        word = word | kv | (unseen << FORWARD_UNSEEN) | tl.where(at == 0, blind, 0)
        tl.store(steps + at, word, mask=listed)
        count += tl.sum(listed.to(tl.int32), 0)
    if count == 0:
        last = n_kv - 1 + tl.arange(0, 1)
        unseen = _lacks_partners(found, last, last == last, kv_len, BLOCK_KV).to(tl.int32)
        tl.store(steps + tl.arange(0, 1), blind | last | (unseen << FORWARD_UNSEEN))
    tl.store(COUNTS + table * q_tiles + q_tile, tl.maximum(count, 1))
