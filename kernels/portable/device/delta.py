"""delta = rowsum(out * do), which the softmax backward subtracts from dP."""

import triton
import triton.language as tl

from .tiles import head_of, load_queries


@triton.jit
def delta_tile(out, do, b, hq, queries, TILE: tl.constexpr, MASK: tl.constexpr):
    """(delta, do): fp32 [BLOCK_Q] and the loaded [BLOCK_Q, BLOCK_D] rows of dO.

    out, do: operands [batch, q heads, q_len, HEAD_DIM]; both are zeros to it in rows that see no key.
    """
    do_head, out_head = head_of(do, b, hq), head_of(out, b, hq)
    do_rows = load_queries(do_head, queries, TILE, MASK)
    out_rows = load_queries(out_head, queries, TILE, MASK)
    return tl.sum(out_rows.to(tl.float32) * do_rows.to(tl.float32), 1), do_rows
