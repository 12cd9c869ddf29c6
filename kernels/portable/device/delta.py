"""delta, which the softmax backward subtracts from dP: rowsum(out * do), less the gradient of the log-sum-exp."""

import triton
import triton.language as tl

from .tiles import head_of, load_do


@triton.jit
def delta_tile(made, do, b, hq, queries, TILE: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr):
    """Returns (delta, dO) of the queries of a tile: fp32 [BLOCK_Q], and the loaded rows of dO, [BLOCK_Q, BLOCK_DV].

    made: see `Made`; do: an operand [batch, q heads, q_len, VALUE_DIM].  Rows that see no key are not read and count as
    zeros.
    """
    do_head, out_head = head_of(do, b, hq), head_of(made.out, b, hq)
    do_rows = load_do(do_head, queries, TILE, MASK)
    out_rows = load_do(out_head, queries, TILE, MASK)
    delta = tl.sum(out_rows.to(tl.float32) * do_rows.to(tl.float32), 1)
    if SCORE.HAS_GRAD_LSE:
        grad_lse = head_of(made.grad_lse, b, hq)
        inside = (queries.numbers >= queries.first) & (queries.numbers < queries.end) & queries.exists
        delta -= tl.load(grad_lse.start + queries.tokens * grad_lse.strides[0], mask=inside, other=0.0)
    return delta, do_rows
