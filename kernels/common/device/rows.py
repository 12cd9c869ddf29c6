"""The places of the tokens of rows, for kernels in plain Triton; see `model.Placed`.

Only `triton.jit` functions live here, as in `tiles`.
"""

import triton
import triton.language as tl


@triton.jit
def tokens_of(PLACE, COUNT, rows, end, PLACED: tl.constexpr):
    """(the tokens of `rows`, which of them have one) under a mask of `end` rows.

    PLACE, COUNT: int32 [row blocks]; PLACED: rows of a row block, or 0 where tokens are rows, and nothing is read.
    """
    exists = rows < end
    if PLACED:
        local = rows % PLACED
        tokens = tl.load(PLACE + rows // PLACED, mask=exists, other=0) + local
        return tokens, local < tl.load(COUNT + rows // PLACED, mask=exists, other=0)
    else:
        return rows, exists
