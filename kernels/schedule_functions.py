"""What the device code calls and `dash_inductor.schedule.codegen` generates, one text per schedule and mask.

These declarations document the interface and give linters the names; `templates.py` pastes the generated text instead.
Lengths, bounds and indices are int32; `lo` and `hi` are anchored top left and unused where the mask has no such bound.
"""

import triton


@triton.jit
def dash_launch(ticket, batch, heads, q_len, kv_len, lo, hi, BLOCK_Q, BLOCK_KV, SECTION):
    """(b * heads + h, slot) of the CTA that holds `ticket`."""


@triton.jit
def dash_kv_tile(slot, part, head, heads, q_len, kv_len, lo, hi, BLOCK_Q, BLOCK_KV):
    """The `part`-th kv tile of a slot."""


@triton.jit
def dash_num_steps(kv, q_len, kv_len, lo, hi, BLOCK_Q, BLOCK_KV):
    """How many q tiles a kv tile visits."""


@triton.jit
def dash_q_tile(step, kv, head, heads, q_len, kv_len, lo, hi, BLOCK_Q, BLOCK_KV):
    """The q tile that a kv tile visits at a step."""


@triton.jit
def dash_rank(q, kv, head, heads, q_len, kv_len, lo, hi, BLOCK_Q, BLOCK_KV):
    """The place of kv tile `kv` in the accumulation order of q tile `q`."""


@triton.jit
def dash_q_range(kv, q_len, kv_len, lo, hi, BLOCK_Q, BLOCK_KV):
    """(first, full_first, full_end, end): q tiles of a kv tile; [full_first, full_end) need no mask."""


@triton.jit
def dash_kv_range(q, q_len, kv_len, lo, hi, BLOCK_Q, BLOCK_KV):
    """(first, full_first, full_end, end): kv tiles of a q tile; [full_first, full_end) need no mask."""


@triton.jit
def dash_seen_rows(q_len, kv_len, lo, hi, BLOCK_Q, BLOCK_KV):
    """(first, end) of the queries that see a key; ``end <= first``, maybe negative, where none does."""


@triton.jit
def dash_seen_keys(q_len, kv_len, lo, hi, BLOCK_Q, BLOCK_KV):
    """(first, end) of the keys that a query sees; ``end <= first``, maybe negative, where there is none."""
