"""After the main kernel: dq from its fp32 accumulator."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["q_heads", "q_len", "kv_len", "lo", "hi", "n_q"])
def finish(
    accumulator, dq_ptr, dq_b, dq_h, dq_row, q_heads, q_len, kv_len, lo, hi, n_q, scale,
    KV_RANGE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """``dq = scale * accumulator``; one program per ROWS (a multiple of 16) rows of a q tile.

    accumulator: fp32 [batch * q_heads * n_q * BLOCK_Q * BLOCK_D], every 16 rows in the order of
    `consumer.in_fragments`. dq: [batch, q_heads, q_len, DIM], unit stride in the last dimension.  Nobody wrote the
    accumulator of a q tile that sees no keys: its dq is zero.
    """
    PER_TILE: tl.constexpr = BLOCK_Q // ROWS
    pid = tl.program_id(0)
    tile = pid // PER_TILE % n_q
    head = pid // PER_TILE // n_q
    b = (head // q_heads).to(tl.int64)
    h = (head % q_heads).to(tl.int64)
    local = pid % PER_TILE * ROWS + tl.arange(0, ROWS)
    rows = tile * BLOCK_Q + local
    columns = tl.arange(0, BLOCK_D)
    first, _full_first, _full_end, end = KV_RANGE(tile, q_len, kv_len, lo, hi, BLOCK_Q, BLOCK_KV)
    keep = (rows < q_len)[:, None] & (columns < DIM)[None, :]
    values = tl.zeros([ROWS * BLOCK_D], tl.float32)
    if first < end:
        values = tl.load(accumulator + pid.to(tl.int64) * ROWS * BLOCK_D + tl.arange(0, ROWS * BLOCK_D)) * scale
    fragments = tl.reshape(values, [ROWS // 16, BLOCK_D // 8, 8, 4, 2, 2])
    dq = tl.reshape(tl.permute(fragments, [0, 4, 2, 1, 3, 5]), [ROWS, BLOCK_D])
    target = dq_ptr + b * dq_b + h * dq_h + rows.to(tl.int64)[:, None] * dq_row + columns[None, :]
    tl.store(target, dq.to(dq_ptr.dtype.element_ty), mask=keep)
