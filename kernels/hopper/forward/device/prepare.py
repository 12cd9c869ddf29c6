"""The kernel before the main kernels of the forward: zeroes the counters from which CTAs take q tiles."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def prepare(counter_ptr, padding, COUNTERS: tl.constexpr, ROWS: tl.constexpr):
    """Zeroes counter_ptr, int32 [COUNTERS], and sets the log-sum-exp of padded rows without a token to -inf.

    padding: the group `arguments.PADDING`, with one program per row block of ROWS rows; None without packed documents,
    with one program.  The main kernel may start at once, because it waits for the end of this one before it reads the
    counter, and does not write these rows.
    """
    gdc_launch_dependents()
    block = tl.program_id(0)
    if block == 0:
        for i in tl.static_range(COUNTERS):
            tl.store(counter_ptr + i, 0)
    if padding is not None:
        local = tl.arange(0, ROWS)
        tokens = tl.load(padding.token_counts_ptr + block)
        if tokens < ROWS:
            rows = padding.lse_ptr + block * ROWS + local
            for head in range(padding.heads):
                of_head = rows + head.to(tl.int64) * padding.rows  # type: ignore[attr-defined]  # a tensor in Triton
                tl.store(of_head, float("-inf"), mask=local >= tokens)
