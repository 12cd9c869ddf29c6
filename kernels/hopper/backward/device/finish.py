"""The kernel that converts dq from its fp32 accumulator; it runs after the main kernel and overlaps its last CTAs."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ....common.device.ordering import wait_semaphore
from ....common.device.rows import tokens_of


@triton.jit
def finish(
    accumulator, semaphores, dq_ptr, dq_strides, q_heads, q_len, kv_len, lo, hi, n_q, scale, data, varlen_layout,
    KV_RANGE: tl.constexpr, FORM,
):  # fmt: skip
    """Writes ``dq = scale * accumulator``; one program per ROWS (a multiple of 16) rows of a q tile.

    accumulator: fp32 [batch * q_heads * n_q * BLOCK_Q * (BLOCK_D + TAIL_D)], for each q tile first the BLOCK_D columns,
    then the others, in the order of `steps.in_fragments`.  A q tile is complete when its semaphore equals the number of
    kv tiles that it sees.  If it sees none, its accumulator was not written, and its dq is zero.  dq: [batch, q_heads,
    q_len, DIM], unit stride in the last dimension.  data: the group `arguments.CONTRIBUTIONS`, None if the mask is a
    band.  With `varlen_layout`, q_len and the accumulator count padded rows, and dq has tokens, see `rows.tokens_of`.
    FORM: an `arguments.Finish`; KV_RANGE: the generated function that returns the kv tiles of a q tile.
    """
    PER_TILE: tl.constexpr = FORM.BLOCK_Q // FORM.ROWS
    pid = tl.program_id(0)
    tile = pid // PER_TILE
    q = tile % n_q
    head = tile // n_q
    b = (head // q_heads).to(tl.int64)
    h = (head % q_heads).to(tl.int64)
    local = pid % PER_TILE * FORM.ROWS
    if data is not None:
        table = head // q_heads * data.table_b + head % q_heads * data.table_h
        count = tl.load(data.contributions + table.to(tl.int64) * n_q + q)
        seen = count > 0
    else:
        tile_schedule = q_len, kv_len, lo, hi
        first, _full_first, _full_end, end = KV_RANGE(q, tile_schedule, FORM.BLOCK_Q, FORM.BLOCK_KV)
        count = end - first
        seen = first < end
    if seen:
        wait_semaphore(semaphores + tile, count, False)
    source = accumulator + tile.to(tl.int64) * (FORM.BLOCK_Q * (FORM.BLOCK_D + FORM.TAIL_D))
    rows = q * FORM.BLOCK_Q + local + tl.arange(0, FORM.ROWS)
    tokens, inside = rows, rows < q_len
    if FORM.VARLEN_ROWS:
        tokens, inside = tokens_of(*varlen_layout, rows, q_len, FORM.VARLEN_ROWS)
    target = dq_ptr + b * dq_strides.b + h * dq_strides.h + tokens.to(tl.int64)[:, None] * dq_strides.row
    _convert(source + local * FORM.BLOCK_D, seen, scale, target, inside, 0, FORM.DIM, FORM.ROWS, FORM.BLOCK_D)
    if FORM.TAIL_D > 0:
        tail = source + FORM.BLOCK_Q * FORM.BLOCK_D + local * FORM.TAIL_D
        _convert(tail, seen, scale, target, inside, FORM.BLOCK_D, FORM.DIM, FORM.ROWS, FORM.TAIL_D)
    if pid == tl.num_programs(0) - 1:
        gdc_wait()  # the end of this kernel is the end of the main kernel too


@triton.jit
def _convert(
    source, seen, scale, target, inside, FIRST: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scales and stores columns FIRST to ``FIRST + COLUMNS`` of ROWS rows, clipped to DIM."""
    values = tl.load(source + tl.arange(0, ROWS * COLUMNS), mask=seen, other=0.0, eviction_policy="evict_first")
    fragments = tl.reshape(values * scale, [ROWS // 16, COLUMNS // 8, 8, 4, 2, 2])
    dq = tl.reshape(tl.permute(fragments, [0, 4, 2, 1, 3, 5]), [ROWS, COLUMNS])
    columns = (FIRST + tl.arange(0, COLUMNS))[None, :]
    tl.store(target + columns, dq.to(target.dtype.element_ty), mask=inside[:, None] & (columns < DIM))
