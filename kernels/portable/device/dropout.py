"""The probabilities that dropout keeps, for the tiles of the portable kernels.

Note [Random bits of dropout] in kernels/reference/dropout.py defines the numbers.  Only `triton.jit` functions live
here: their text is pasted into Inductor's template (see `templates.py`).

Blocks of random bits are put together by joins, reshapes and permutations that leave them where a matmul has the
elements of its result: the compiler lets every thread compute the bits of its own elements, and nothing is exchanged.
"""

import triton
import triton.language as tl


@triton.jit
def dropout_kept(drop, b, hq, q_tile, kv_tile, TILE: tl.constexpr, SCORE: tl.constexpr):
    """Returns whether the probabilities of a tile pair are kept: booleans [BLOCK_Q, BLOCK_KV].

    Both block sizes must be multiples of 16.
    """
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_KV: tl.constexpr = TILE.BLOCK_KV
    seed, threshold, _rescale = drop
    rows = q_tile * (BLOCK_Q // 2) + tl.arange(0, BLOCK_Q // 2)[:, None]
    keys = kv_tile * (BLOCK_KV // 4) + tl.arange(0, BLOCK_KV // 4)[None, :]
    w00, w01, w10, w11 = dropout_words(seed, rows, keys, hq, b, SCORE.ROUNDS)
    # one dimension more for each of the bits 0 of the key, 3 of the key, and 3 of the row, in this order
    of_keys = tl.join(dropout_halves(w00, threshold), dropout_halves(w01, threshold))
    more_keys = tl.join(dropout_halves(w10, threshold), dropout_halves(w11, threshold))
    parts = tl.reshape(tl.join(of_keys, more_keys), [BLOCK_Q // 16, 8, BLOCK_KV // 16, 4, 2, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 6, 1, 2, 5, 3, 4)), [BLOCK_Q, BLOCK_KV])


@triton.jit
def dropout_kept_transposed(drop, b, hq, q_tile, kv_tile, TILE: tl.constexpr, SCORE: tl.constexpr):
    """Returns whether the probabilities of a tile pair are kept, as `dropout_kept` does, but as [BLOCK_KV, BLOCK_Q].

    In this layout the keys that share a block of random bits lie in different threads, and both threads compute it.
    """
    BLOCK_Q: tl.constexpr = TILE.BLOCK_Q
    BLOCK_KV: tl.constexpr = TILE.BLOCK_KV
    seed, threshold, _rescale = drop
    rows = q_tile * (BLOCK_Q // 2) + tl.arange(0, BLOCK_Q // 2)[None, :]
    keys = kv_tile * (BLOCK_KV // 2) + tl.arange(0, BLOCK_KV // 2)[:, None]
    half = ((keys & 1) * 16).to(tl.uint32)
    w00, w01, w10, w11 = dropout_words(seed, rows, keys >> 1, hq, b, SCORE.ROUNDS)
    # one dimension more for each of the bits 3 of the key and 3 of the row, in this order
    of_keys = tl.join(dropout_half(w00, half, threshold), dropout_half(w01, half, threshold))
    more_keys = tl.join(dropout_half(w10, half, threshold), dropout_half(w11, half, threshold))
    parts = tl.reshape(tl.join(of_keys, more_keys), [BLOCK_KV // 16, 8, BLOCK_Q // 16, 8, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 4, 1, 2, 5, 3)), [BLOCK_KV, BLOCK_Q])


@triton.jit
def dropout_words(seed, rows, keys, hq, b, ROUNDS: tl.constexpr):
    """Returns the four 32-bit words of each Philox block of random bits of a query head of a batch element.

    rows, keys: the first two words of the blocks' counters; one of them is a column, so that they broadcast.
    """
    zeros = rows.to(tl.int32) * 0 + keys.to(tl.int32) * 0
    c0, c1 = zeros + rows.to(tl.int32), zeros + keys.to(tl.int32)
    return tl.philox(seed, c0, c1, zeros + hq.to(tl.int32), zeros + b.to(tl.int32), ROUNDS)


@triton.jit
def dropout_half(words, half, threshold):
    """Returns whether the 16 bits of each word that begin at bit `half` (0 or 16) keep a probability.

    See Note [Comparing random bits]: a bfloat16 number is an fp32 number whose lower bits are zero.
    """
    count = tl.minimum(threshold, 65536 - threshold)
    bound = tl.where(count <= 0x7F80, 0xFF80 - count, count - 0x7F81).to(tl.uint32) << 16
    numbers = (words << (16 - half)) & 0xFFFF0000
    below = numbers.to(tl.float32, bitcast=True) < bound.to(tl.float32, bitcast=True)
    return below != (threshold <= 32768)


@triton.jit
def dropout_halves(words, threshold):
    """Returns whether the lower and the upper 16 bits of each word keep a probability: bool [..., 2]."""
    return tl.join(dropout_half(words, 0, threshold), dropout_half(words, 16, threshold))
