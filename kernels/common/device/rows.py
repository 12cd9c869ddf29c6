"""The tokens of padded rows (varlen layout) for plain Triton kernels; see `model.VarlenLayout`.

This module contains only `triton.jit` functions, because their text is pasted into Inductor's templates.
"""

import triton
import triton.language as tl


@triton.jit
def tokens_of(TOKEN_OFFSETS, TOKEN_COUNTS, rows, end, VARLEN_ROWS: tl.constexpr):
    """Returns (token index of each of `rows`, whether it has a token: bool), for a varlen layout of `end` padded rows.

    TOKEN_OFFSETS, TOKEN_COUNTS: int32 [row blocks], the first token and the number of tokens of each row block;
    VARLEN_ROWS: rows of a row block, or 0 where tokens are rows and neither is read.
    """
    exists = rows < end
    if VARLEN_ROWS:
        local = rows % VARLEN_ROWS
        tokens = tl.load(TOKEN_OFFSETS + rows // VARLEN_ROWS, mask=exists, other=0) + local
        return tokens, local < tl.load(TOKEN_COUNTS + rows // VARLEN_ROWS, mask=exists, other=0)
    else:
        return rows, exists
