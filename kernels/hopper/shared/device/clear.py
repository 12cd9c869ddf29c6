"""Zeroes rows of tiles in shared memory that take no part in attention; the producer does so before consumers read
them.

Note [Rows that take no part]
    Matmuls take whole tiles, and zero times NaN is NaN.  So values that are multiplied by the probability or the
    gradient of a score that the mask hides must be finite: V in the forward; K, V, Q and dO in the backward.  A key
    that no query sees and a query that sees no key may hold anything, and are made zeros.

    Few tiles have such rows: the tiles in which padding begins or a packed document ends.  The copy of such a tile does
    not complete the barrier for which consumers wait: it arrives at a barrier of the producer's own, the last one of
    its ring.  The producer then writes zeros, makes them visible to matmuls, and completes the barrier of the tile
    itself.  Consumers wait where they always wait.

    Keys that some query sees and queries that see some key keep their values.  If one of these is not finite, results
    of queries and keys that do not see it may become NaN as well.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .operations import as_words, here, role_barrier


@gluon.jit
def numbers(COUNT: gl.constexpr):
    """Returns 0 .. COUNT - 1, int32, in the producer warp's layout for vectors with one element per row of a tile."""
    return gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def unseen_keys(keys_seen, row, kv, kv_len, BLOCK_KV: gl.constexpr):
    """Returns int32 [BLOCK_KV]: 1 for keys of kv tile `kv` that no query sees; 0 for others and past the last key.

    keys_seen: pointer to bytes [.., kv_len]; `row`: the index of the row for this batch element and head.
    """
    keys = kv * BLOCK_KV + numbers(BLOCK_KV)
    pointers = keys_seen + row.to(gl.int64) * kv_len + keys
    return gl.where(gl.load(pointers, mask=keys < kv_len, other=1) == 0, 1, 0)


@gluon.jit
def keys_behind(kv, kv_len, BLOCK_KV: gl.constexpr):
    """Returns int32 [BLOCK_KV]: 1 for keys of kv tile `kv` from `kv_len` on, 0 for others."""
    return gl.where(kv * BLOCK_KV + numbers(BLOCK_KV) >= kv_len, 1, 0)


@gluon.jit
def blind_queries(lse):
    """Returns int32 [rows]: 1 for queries of a tile that see no key, 0 for others.

    lse: the tile's log-sum-exp in shared memory, in which `prepare` has marked these queries by inf.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    return gl.where(lse.load(layout) == float("inf"), 1, 0)


@gluon.jit
def clear(tile, hidden):
    """Zeroes the rows of a [rows, columns] tile of 16-bit numbers in shared memory where `hidden`, int32 [rows], is 1.

    Four rows are read and written at a time, 16 bytes by each thread: consumers may be waiting for the tile.
    """
    ROWS: gl.constexpr = tile.shape[0]
    words = as_words(tile)
    BLOCKS: gl.constexpr = words.shape[0] * 4 // ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    four = gl.arange(0, 4, gl.SliceLayout(1, layout))
    rows = numbers(ROWS)
    for first in gl.static_range(0, ROWS, 32):
        within = (rows >= first) & (rows < first + 32)
        left = gl.sum(gl.where(within, hidden << (rows % 32), 0), 0)
        for i in range(0, here(gl.where(left != 0, 32 if ROWS >= 32 else ROWS, 0)), 4):  # not unrolled
            is_hidden = gl.expand_dims((left >> (four + i)) & 1, 1) != 0
            for block in gl.static_range(BLOCKS):
                place = words.index((block * ROWS + first + i) // 4)
                place.store(gl.where(is_hidden, 0, place.load(layout)))


@gluon.jit
def complete(full):
    """Arrives at `full`, for which a tile's consumers wait, once it is loaded and cleared; for the producer."""
    fence_async_shared()
    role_barrier()
    mbarrier.arrive(full, count=1)
