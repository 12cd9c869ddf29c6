"""Token offsets of padded rows (varlen layout) for plain Triton kernels; see `model.Placed`.

This module contains only `triton.jit` functions, as `tiles` does.
"""

import triton
import triton.language as tl


@triton.jit
def tokens_of(PLACE, COUNT, rows, end, PLACED: tl.constexpr):
    """Returns (the tokens of `rows`, which rows have one), for a varlen layout of `end` padded rows.

    PLACE, COUNT: int32 [row blocks]; PLACED: rows of a row block, or 0 where tokens are rows and nothing is read.
    """
    exists = rows < end
    if PLACED:
        local = rows % PLACED
        tokens = tl.load(PLACE + rows // PLACED, mask=exists, other=0) + local
        return tokens, local < tl.load(COUNT + rows // PLACED, mask=exists, other=0)
    else:
        return rows, exists
