"""Converts ids of tokens to *segment ids* on the device: small integers that are equal where the ids are equal.

With segment ids, every mask of valid keys and segments is one comparison: a query sees a key iff the band lets it and
their segment ids are equal.  `first_equal` makes them.

Any ids in any order are allowed, but documents and padding are usual: there, neighbouring tokens have the same id, and
few tiles of tokens have ids in common.  So tiles have *ranges*, their smallest and largest id or segment id, and only
tiles whose ranges meet are compared token by token.

Only integers are computed, no program reads what another one of the same kernel writes, and whatever belongs to a batch
element is computed from its own data.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .relations.equal import ALONE
from .relations.form import FAR, HIDDEN

LOWEST, HIGHEST = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)
"""The smallest and the largest id."""


class Tokens(NamedTuple):
    """Block sizes of the kernels that compare tokens.

    BLOCK: tokens of a tile; PARTNERS: tokens that are compared with a tile at once; TILES: ranges of tiles that are
    compared at once.
    """

    BLOCK: int
    PARTNERS: int
    TILES: int


@triton.jit
def next_tile(tiles, low, high, after, smallest, largest):
    """Returns the first of `tiles` after tile `after` whose range of ids overlaps ``smallest .. largest``, else FAR.

    tiles: tile indices; low, high: the smallest and the largest id of each of them.
    """
    return tl.min(tl.where((tiles > after) & (low <= largest) & (high >= smallest), tiles, FAR), 0)


@triton.jit(do_not_specialize=["kv_len"])
def find_starts(KV_IDS, STARTS, kv_ids_b, kv_ids_j, kv_len, BLOCK: tl.constexpr):
    """Writes, for each tile of keys, the smallest and the largest id with which a run begins in it.

    A run is a sequence of neighbouring keys with equal ids.  One program per (batch element, BLOCK keys).  KV_IDS:
    integers [batch, kv_len], with its strides; STARTS: int64 [batch, key tiles, 2], an empty range where no run begins.
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
    """Returns int32 [BLOCK]: the first key with each id of `own`; ALONE if there is none, undefined where not `inside`.

    Tiles are visited in order, skipping those in which no run begins that could have an id not yet found.
    """
    BLOCK: tl.constexpr = TOKENS.BLOCK
    segment_id = tl.full([BLOCK], FAR, tl.int32)
    smallest = tl.min(tl.where(inside, own, HIGHEST), 0)
    largest = tl.max(tl.where(inside, own, LOWEST), 0)
    number = tl.cdiv(kv_len, BLOCK)
    for first in range(0, number, TOKENS.TILES):
        tiles = first + tl.arange(0, TOKENS.TILES)
        low = tl.load(STARTS + tiles * 2, mask=tiles < number, other=HIGHEST)
        high = tl.load(STARTS + tiles * 2 + 1, mask=tiles < number, other=LOWEST)
        tile = next_tile(tiles, low, high, -1, smallest, largest)
        while tile < number:
            for part in range(0, BLOCK, TOKENS.PARTNERS):
                j = tile * BLOCK + part + tl.arange(0, TOKENS.PARTNERS)
                there = j < kv_len
                ids = tl.load(KV_IDS + j.to(tl.int64) * kv_ids_j, mask=there, other=0).to(tl.int64)
                equal = (ids[:, None] == own[None, :]) & there[:, None]
                segment_id = tl.minimum(segment_id, tl.min(tl.where(equal, j[:, None], FAR), 0))
            missing = inside & (segment_id == FAR)
            smallest = tl.min(tl.where(missing, own, HIGHEST), 0)
            largest = tl.max(tl.where(missing, own, LOWEST), 0)
            tile = next_tile(tiles, low, high, tile, smallest, largest)
    return tl.where(segment_id == FAR, ALONE, segment_id)


@triton.jit
def range_of(segment_id, counted):
    """Returns the smallest and largest segment id where `counted` is true, or the empty range (FAR, HIDDEN)."""
    return tl.min(tl.where(counted, segment_id, FAR), 0), tl.max(tl.where(counted, segment_id, HIDDEN), 0)


@triton.jit
def _encode(
    tile, IDS, KV_IDS, STARTS, VALID, SEGMENT_IDS, RANGE, ids_i, kv_ids_j, valid_j, length, kv_len,
    HAS_IDS: tl.constexpr, HAS_VALID: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Writes the segment ids of a tile of BLOCK tokens of one batch element and one side, and their range to RANGE.

    Negative segment ids, of tokens without a partner, do not count for the range, which may be empty.
    """
    BLOCK: tl.constexpr = TOKENS.BLOCK
    tokens = tile * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < length
    segment_id = tl.zeros([BLOCK], tl.int32)
    if HAS_IDS:
        own = tl.load(IDS + tokens.to(tl.int64) * ids_i, mask=inside, other=0).to(tl.int64)
        segment_id = _first_key(own, inside, KV_IDS, STARTS, kv_ids_j, kv_len, TOKENS)
    if HAS_VALID:
        valid = tl.load(VALID + tokens.to(tl.int64) * valid_j, mask=inside, other=0) != 0
        segment_id = tl.where(valid, segment_id, HIDDEN)
    tl.store(SEGMENT_IDS + tokens, segment_id, mask=inside)
    smallest, largest = range_of(segment_id, inside & (segment_id >= 0))
    tl.store(RANGE, smallest)
    tl.store(RANGE + 1, largest)


@triton.jit(do_not_specialize=["q_len", "kv_len"])
def first_equal(
    Q_IDS, KV_IDS, STARTS, VALID, Q_SEGMENT_IDS, KV_SEGMENT_IDS, RANGES, q_ids_b, q_ids_i, kv_ids_b, kv_ids_j,
    valid_b, valid_j, q_len, kv_len,
    HAS_IDS: tl.constexpr, HAS_VALID: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Writes a segment id for each token, the index of the first key with the same id, and the range of each tile's.

    One program per (batch element, BLOCK queries or keys).  Q_IDS, KV_IDS: the mask's ids, integers [batch, q_len],
    [batch, kv_len]; STARTS: written by `find_starts` with the same BLOCK; VALID: bool or uint8 [batch, kv_len]; all but
    STARTS with their strides.  Q_SEGMENT_IDS, KV_SEGMENT_IDS: int32 [batch, q_len], [batch, kv_len], the results, each
    one of the QUERIES or KEYS vectors of a batch element; without ids every segment id is 0.  RANGES: int32 [batch,
    query tiles and key tiles, 2], the smallest and largest segment id of each tile.
    """
    b, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_ids = KV_IDS + b * kv_ids_b
    starts = STARTS + b * tl.cdiv(kv_len, TOKENS.BLOCK) * 2
    place = RANGES + (b * tl.num_programs(1) + tile) * 2
    q_tiles = tl.cdiv(q_len, TOKENS.BLOCK)
    if tile < q_tiles:
        _encode(
            tile, Q_IDS + b * q_ids_b, kv_ids, starts, VALID, Q_SEGMENT_IDS + b * (QUERIES * q_len), place, q_ids_i,
            kv_ids_j, valid_j, q_len, kv_len, HAS_IDS, False, TOKENS,
        )  # fmt: skip
    else:
        _encode(
            tile - q_tiles, kv_ids, kv_ids, starts, VALID + b * valid_b, KV_SEGMENT_IDS + b * (KEYS * kv_len), place,
            kv_ids_j, kv_ids_j, valid_j, kv_len, kv_len, HAS_IDS, HAS_VALID, TOKENS,
        )  # fmt: skip
