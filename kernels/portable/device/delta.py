"""delta, which the softmax backward subtracts from dP: rowsum(out * do), less the gradient of the log-sum-exp.

Note [Rows of any alignment]
    A thread loads up to 16 bytes of a row at once, as far as the compiler can prove that they are aligned.  If the
    value dim is a multiple of 8, rows begin at multiples of 16 bytes whatever lies between them in memory: other heads,
    or key and value.  Otherwise strides decide how much a thread loads, and with it which thread has which column: a
    sum in the order of the layout would have bits that depend on what lies next to a head.  So such rows are summed by
    `row_sums`, in the same order in any layout, and products are rounded before they are added, because the layout also
    decides whether the compiler could fuse the two.
"""

import triton
import triton.language as tl

from .tiles import head_of, load_do, row_sums


@triton.jit
def delta_tile(made, do, b, hq, queries, TILE: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr):
    """Returns (delta, dO) of the queries of a tile: fp32 [BLOCK_Q], and the loaded rows of dO, [BLOCK_Q, BLOCK_DV].

    made: see `Made`; do: an operand [batch, q heads, q_len, VALUE_DIM].  Rows that see no key are not read and count as
    zeros.
    """
    do_head, out_head = head_of(do, b, hq), head_of(made.out, b, hq)
    do_rows = load_do(do_head, queries, TILE, MASK)
    out_rows = load_do(out_head, queries, TILE, MASK)
    if TILE.VALUE_DIM % 8 == 0:
        delta = tl.sum(out_rows.to(tl.float32) * do_rows.to(tl.float32), 1)
    else:  # Note [Rows of any alignment]
        products = tl.math.fma(out_rows.to(tl.float32), do_rows.to(tl.float32), 0.0)
        delta = row_sums(products, TILE.BLOCK_Q, TILE.BLOCK_DV)
    if SCORE.HAS_GRAD_LSE:
        grad_lse = head_of(made.grad_lse, b, hq)
        inside = (queries.numbers >= queries.first) & (queries.numbers < queries.end) & queries.exists
        delta -= tl.load(grad_lse.start + queries.tokens * grad_lse.strides[0], mask=inside, other=0.0)
    return delta, do_rows
