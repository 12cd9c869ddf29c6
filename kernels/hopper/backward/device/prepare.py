"""The kernel before the main kernel: computes delta and the base-2 log-sum-exp, and resets semaphores and work id."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ....common.device.rows import tokens_of


@triton.jit
def prepare(
    out_ptr, do_ptr, lse_ptr, lse2_ptr, delta_ptr, counters_ptr, counters, out_strides, do_strides, lse_strides,
    q_heads, first_row, end_row, n_q, varlen_layout, grad_lse, FORM,
):  # fmt: skip
    """Computes delta and lse2 of one q tile per program (batch element, query head, q tile); FORM: an
    `arguments.Prepare`.

    out, do: [batch, q_heads, q_len, DIM], unit stride in the last dimension; lse: fp32 [batch, q_heads, >= q_len],
    natural log.  The results are lse2 (lse in base 2) and delta (row sums of out * do), fp32 [batch * q_heads * n_q *
    BLOCK_Q].  Rows first_row .. end_row-1 see keys of the band.  Other rows and rows past q_len are not read and get
    ``lse2 = inf, delta = 0``, so that their probabilities and gradients are zero, whatever a forward writes there. With
    HAS_DATA the same holds for rows whose lse is -inf, from which the rest of the mask hides all keys. counters_ptr:
    int32 [counters], semaphores and work id, set to zero.  If VARLEN_ROWS > 0, rows are the padded rows of the mask,
    and out and do have tokens, see `rows.tokens_of`; rows without a token are treated as rows that see no key.
    grad_lse: the group `arguments.GRAD_LSE`, subtracted from delta, or None.
    """
    BLOCK_Q: tl.constexpr = FORM.BLOCK_Q
    gdc_launch_dependents()
    pid = tl.program_id(0)
    tile = pid % n_q
    head = pid // n_q
    place = pid.to(tl.int64) * BLOCK_Q
    b = (head // q_heads).to(tl.int64)
    h = (head % q_heads).to(tl.int64)
    local = tl.arange(0, BLOCK_Q)
    rows = tile * BLOCK_Q + local
    tokens, exists = rows, rows < end_row
    if FORM.VARLEN_ROWS:
        tokens, exists = tokens_of(*varlen_layout, rows, end_row, FORM.VARLEN_ROWS)
    inside = (rows >= first_row) & exists
    columns = tl.arange(0, FORM.BLOCK_DV)
    keep = inside[:, None] & (columns < FORM.DIM)[None, :]
    offsets = tokens.to(tl.int64)[:, None]
    out_rows = out_ptr + b * out_strides.b + h * out_strides.h + offsets * out_strides.row
    out = tl.load(out_rows + columns[None, :], mask=keep, other=0.0)
    do_rows = do_ptr + b * do_strides.b + h * do_strides.h + offsets * do_strides.row
    do = tl.load(do_rows + columns[None, :], mask=keep, other=0.0)
    sums = lse_ptr + b * lse_strides.b + h * lse_strides.h + rows.to(tl.int64) * lse_strides.row
    lse = tl.load(sums, mask=inside, other=float("inf"))
    if FORM.HAS_DATA:
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(lse2_ptr + place + local, lse * 1.4426950408889634)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if grad_lse is not None:
        gradients = grad_lse.ptr + b * grad_lse.b + h * grad_lse.h + tokens.to(tl.int64) * grad_lse.row
        delta -= tl.load(gradients, mask=inside, other=0.0)
    if FORM.HAS_DATA:
        delta = tl.where(lse == float("inf"), 0.0, delta)
    tl.store(delta_ptr + place + local, delta)
    for i in range(pid, counters, tl.num_programs(0)):
        tl.store(counters_ptr + i, 0)
