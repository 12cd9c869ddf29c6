"""Which probabilities dropout keeps, for the tiles of the portable kernels.

Note [Random bits of dropout] in reference_dropout.py defines the numbers.  Only `triton.jit` functions live here: their
text is pasted into Inductor's template (see `templates.py`).
"""

import triton
import triton.language as tl


@triton.jit
def dropout_kept(drop, b, hq, q_tile, kv_tile, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Which probabilities of a tile pair are kept: booleans [BLOCK_Q, BLOCK_KV].

    drop: (seed, threshold, _).  Both blocks are multiples of 16.
    """
    seed, threshold, _rescale = drop
    rows = q_tile * (BLOCK_Q // 2) + tl.arange(0, BLOCK_Q // 2)
    keys = kv_tile * (BLOCK_KV // 4) + tl.arange(0, BLOCK_KV // 4)
    zeros = tl.zeros([BLOCK_Q // 2, BLOCK_KV // 4], tl.int32)
    w00, w01, w10, w11 = tl.philox(
        seed, zeros + rows[:, None].to(tl.int32), zeros + keys[None, :].to(tl.int32), zeros + hq.to(tl.int32),
        zeros + b.to(tl.int32),
    )  # fmt: skip
    # one dimension for each of the bits 0 of the key, 3 of the key, and 3 of the row
    of_rows = tl.join(
        tl.join(dropout_halves(w00, threshold), dropout_halves(w01, threshold)),
        tl.join(dropout_halves(w10, threshold), dropout_halves(w11, threshold)),
    )
    parts = tl.reshape(of_rows, [BLOCK_Q // 16, 8, BLOCK_KV // 16, 4, 2, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 6, 1, 2, 5, 3, 4)), [BLOCK_Q, BLOCK_KV])


@triton.jit
def dropout_halves(words, threshold):
    """Whether the lower and the upper half of each word keep a probability: [..., 2]."""
    return tl.join((words & 0xFFFF) >= threshold, (words >> 16) >= threshold)
