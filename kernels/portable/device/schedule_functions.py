"""Declares the device functions that `dash_inductor.schedule.codegen` generates per schedule and mask.

The declarations document the interface and give linters the names; `templates.py` pastes the generated text instead.

`tile_schedule` is the tuple of `codegen.TILE_SCHEDULE`: q_len, kv_len, and the bounds lo and hi of the band, anchored
top left and never read where the mask has none.  All values are int32.  Tile schedules and ranks are the same for every
head.
"""

import triton


@triton.jit
def dash_launch(work_id, heads, tile_schedule, BLOCK_Q, BLOCK_KV, HEAD_CHUNK):
    """Returns (head, CTA index within the head) for a work id; `heads` is the number of heads of all batch elements."""


@triton.jit
def dash_kv_tile(cta_index, part, tile_schedule, BLOCK_Q, BLOCK_KV):
    """Returns the kv tile that the CTA with this index within its head processes as number `part`, from 0."""


@triton.jit
def dash_visits(kv, tile_schedule, BLOCK_Q, BLOCK_KV):
    """Returns the number of q tiles that a kv tile visits: the number of iterations of its tile schedule."""


@triton.jit
def dash_q_tile(kv, step, tile_schedule, BLOCK_Q, BLOCK_KV):
    """Returns the q tile that iteration `step` of a kv tile visits."""


@triton.jit
def dash_rank(q, kv, tile_schedule, BLOCK_Q, BLOCK_KV):
    """Returns the rank of kv tile `kv` in the accumulation order of q tile `q`."""


@triton.jit
def dash_q_range(kv, tile_schedule, BLOCK_Q, BLOCK_KV):
    """Returns (first, full_first, full_end, end): a kv tile sees the q tiles from first to end - 1.

    The q tiles from full_first to full_end - 1 need no mask.
    """


@triton.jit
def dash_kv_range(q, tile_schedule, BLOCK_Q, BLOCK_KV):
    """Returns (first, full_first, full_end, end): a q tile sees the kv tiles from first to end - 1.

    The kv tiles from full_first to full_end - 1 need no mask.
    """


@triton.jit
def dash_seen_rows(tile_schedule, BLOCK_Q, BLOCK_KV):
    """Returns (first, end) of the queries that see any key; ``end <= first``, possibly negative, if there are none."""


@triton.jit
def dash_seen_keys(tile_schedule, BLOCK_Q, BLOCK_KV):
    """Returns (first, end) of the keys that any query sees; ``end <= first``, possibly negative, if there are none."""
