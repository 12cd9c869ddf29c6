"""Sums of dS over batch elements and heads: the gradient of a bias that these share, a tile of pairs at a time.

Note [Sums of a bias's gradient]
    One program owns a tile of pairs of each plane of a bias, and adds one addend (the dS of a batch element and head)
    after the other, in ascending order: nobody else reads or writes the sum meanwhile, and its order is fixed.  The sum
    begins with zero, and every addend P * (dP - delta) is spelled as a fused multiply-add, so that the compiler has no
    choice.  Between two addends the sum is in memory, in fp32, and the last addend's program writes the gradient.

    A thread reads again what it has written into memory.  Elements lie there in the order in which the threads of a
    matmul have them, 16 bytes of a thread after 16 bytes of its neighbour, so that nothing is exchanged between
    threads; the order means nothing to anyone else.
"""

import triton
import triton.language as tl

from .schedule_functions import dash_kv_range
from .tiles import numbers_of, prefetch


@triton.jit
def add_to_sum(
    sums, p, dp, q_tile, kv, queries, keys, tile_schedule, later, wanted,
    ADDS: tl.constexpr, TILE: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """Adds p * dp, fp32 [BLOCK_Q, BLOCK_KV], to the sum of tile pair (q_tile, kv), and stores the final sum.

    sums: `Sums`; the final sum goes to its gradient.  Without ADDS there is a single addend.  If `wanted`, the sum of
    tile pair (q_tile, later), for a later iteration, is prefetched into the L2 cache.
    """
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_KV: tl.constexpr = TILE.BLOCK_KV
    _q_len, kv_len, _lo, _hi = tile_schedule
    if ADDS:
        places = tl.arange(0, BLOCK_Q * BLOCK_KV)
        row = sums.SUMS + q_tile.to(tl.int64) * tl.cdiv(kv_len, BLOCK_KV) * (BLOCK_Q * BLOCK_KV)
        tile = row + tl.cast(kv, keys.numbers.dtype) * (BLOCK_Q * BLOCK_KV)
        if wanted & (sums.begins == 0):
            ahead = row + tl.cast(later, keys.numbers.dtype) * (BLOCK_Q * BLOCK_KV)
            prefetch(ahead + tl.arange(0, BLOCK_Q * BLOCK_KV // 16) * 16, BUILD.INTERPRET)
        before = tl.load(tile + places, mask=(places >= 0) & (sums.begins == 0), other=0.0)
        total = tl.math.fma(p, dp, by_pairs(before, BLOCK_Q, BLOCK_KV))
        if sums.ends:
            store_gradient(sums.gradient, total, queries.numbers, keys.numbers, tile_schedule)
        else:
            tl.store(tile + places, by_threads(total, BLOCK_Q, BLOCK_KV))
    else:
        store_gradient(sums.gradient, p * dp, queries.numbers, keys.numbers, tile_schedule)


@triton.jit
def store_gradient(gradient, total, q_rows, kv_rows, tile_schedule):
    """Stores `total`, fp32 [len(q_rows), len(kv_rows)], at these positions of a bias gradient.

    gradient: an `Operand` [q_len, kv_len].
    """
    q_len, kv_len, _lo, _hi = tile_schedule
    inside = (q_rows < q_len)[:, None] & (kv_rows < kv_len)[None, :]
    start, strides = gradient
    pointers = start + q_rows[:, None] * strides[0] + kv_rows[None, :] * strides[1]
    tl.store(pointers, total.to(start.dtype.element_ty), mask=inside)


@triton.jit
def by_threads(tile, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Flattens a tile of pairs to [BLOCK_Q * BLOCK_KV], in the order in which a matmul's threads hold its elements."""
    parts = tl.reshape(tile, [BLOCK_Q // 16, 2, 8, BLOCK_KV // 8, 4, 2])
    return tl.reshape(tl.permute(parts, (3, 0, 2, 4, 1, 5)), [BLOCK_Q * BLOCK_KV])


@triton.jit
def by_pairs(elements, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Inverts `by_threads`: returns the tile of pairs [BLOCK_Q, BLOCK_KV]."""
    parts = tl.reshape(elements, [BLOCK_KV // 8, BLOCK_Q // 16, 8, 4, 2, 2])
    return tl.reshape(tl.permute(parts, (1, 4, 2, 0, 3, 5)), [BLOCK_Q, BLOCK_KV])


@triton.jit
def zero_unseen(gradient, q_tile, tile_schedule, TILE: tl.constexpr, BUILD: tl.constexpr):
    """Stores a zero gradient of the bias for the unvisited tile pairs of a q tile; gradient: as in `Sums`."""
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_KV: tl.constexpr = TILE.BLOCK_KV
    _q_len, kv_len, _lo, _hi = tile_schedule
    q_rows = numbers_of(q_tile, BLOCK_Q, BUILD)
    zeros = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    first, _full_first, _full_end, end = dash_kv_range(q_tile, tile_schedule, BLOCK_Q, BLOCK_KV)
    for kv in range(tl.cdiv(kv_len, BLOCK_KV)):
        if (kv < first) | (kv >= end):
            store_gradient(gradient, zeros, q_rows, numbers_of(kv, BLOCK_KV, BUILD), tile_schedule)
