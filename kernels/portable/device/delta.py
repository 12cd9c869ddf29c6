"""delta = rowsum(out * do), which the softmax backward subtracts from dP."""

import triton
import triton.language as tl

from .tiles import head_start, load_queries


@triton.jit
def delta_tile(
    OUT, DO, out_strides, do_strides, b, hq, q_rows, q_first, q_end, tokens, exists,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_Q: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """(delta, do): fp32 [len(q_rows)] and the loaded [len(q_rows), BLOCK_D] rows of DO.

    OUT, DO: [batch, q heads, q_len, HEAD_DIM], any strides (b, h, row, column); both are zeros to it outside the rows
    q_first .. q_end-1.  tokens, exists: as of `tiles.place_rows`, for PLACED; then these have tokens.
    """
    do_head, out_head = head_start(DO, b, hq, do_strides), head_start(OUT, b, hq, out_strides)
    do = load_queries(
        do_head, q_rows, q_first, q_end, tokens, exists, do_strides[2], do_strides[3], HEAD_DIM, BLOCK_D, EVEN_Q, PLACED
    )
    out = load_queries(
        out_head, q_rows, q_first, q_end, tokens, exists, out_strides[2], out_strides[3], HEAD_DIM, BLOCK_D, EVEN_Q,
        PLACED,
    )  # fmt: skip
    return tl.sum(out.to(tl.float32) * do.to(tl.float32), 1), do
