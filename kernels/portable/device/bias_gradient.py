"""The gradient of a bias for one tile of pairs: dS, summed over batch elements and heads.

This kernel keeps the sum in registers and has a program for every tile of pairs, whereas the dq kernel adds by
`bias_sums`, with fewer programs.  Both give equal bits unless the mask is dense, where two-pass plans do not use this
kernel.
"""

import triton
import triton.language as tl

from .dropout import dropout_kept
from .schedule_functions import dash_kv_range, dash_seen_keys, dash_seen_rows
from .tiles import (
    head_of,
    load_bias,
    load_delta,
    load_do,
    load_k,
    load_of_keys,
    load_of_queries,
    load_q,
    load_sums,
    load_v,
    numbers_of,
    probabilities,
    rows_of,
    visible,
)


@triton.jit
def bias_gradient_tile(
    inputs, saved, data, first, turns, q_tile, kv, tile_schedule,
    TILE: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """Returns the sum of dS over batch elements and heads for one tile of pairs: fp32 [BLOCK_Q, BLOCK_KV].

    Addends are in ascending order of batch elements and, within each, query heads.

    first: (first batch element, first query head); turns: (number of batch elements, number of query heads).  The other
    arguments are as for `dkdv_tile`.
    """
    q_len, kv_len, _lo, _hi = tile_schedule
    b_first, hq_first = first
    b_turns, hq_turns = turns
    seen_rows = dash_seen_rows(tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
    seen_keys = dash_seen_keys(tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
    queries = rows_of(data, numbers_of(q_tile, TILE.BLOCK_Q, BUILD), seen_rows, q_len, MASK)
    keys = rows_of(data, numbers_of(kv, TILE.BLOCK_KV, BUILD), seen_keys, kv_len, MASK)
    _first, full_first, full_end, _end = dash_kv_range(q_tile, tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
    total = tl.zeros([TILE.BLOCK_Q, TILE.BLOCK_KV], tl.float32)
    for turn in tl.range(0, b_turns * hq_turns, num_stages=BUILD.STAGES):
        b = b_first + turn // hq_turns
        hq = hq_first + turn % hq_turns
        h = hq // TILE.GROUP
        q_head, do_head, lse_head = head_of(inputs.q, b, hq), head_of(saved.do, b, hq), head_of(saved.lse, b, hq)
        row = (b * saved.heads * TILE.GROUP + hq).to(tl.int64)
        do = load_do(do_head, queries, TILE, MASK)
        delta = load_delta(saved, row, queries, q_len, TILE)
        q = load_q(q_head, queries, TILE, MASK)
        of_queries = load_of_queries(data, b, queries)
        lse, excess = load_sums(lse_head, queries, q_len, TILE, SCORE)
        k_head, v_head = head_of(inputs.k, b, h), head_of(inputs.v, b, h)
        of_keys = load_of_keys(data, b, h, keys, MASK)
        k = load_k(k_head, keys, of_keys, TILE, MASK)
        s = tl.dot(q, tl.trans(k), input_precision=BUILD.PRECISION)
        v = load_v(v_head, keys, of_keys, TILE, MASK)
        dp = tl.dot(do, tl.trans(v), input_precision=BUILD.PRECISION)
        bias = load_bias(data, b, hq, queries, keys, tile_schedule, False, SCORE)
        p = probabilities(s, bias, lse[:, None], excess[:, None], SCORE)
        if SCORE.ROUNDS:
            kept = dropout_kept(data.drop, b, hq, q_tile, kv, TILE, SCORE)
            dp = tl.where(kept, dp * data.drop.rescale, 0.0)
        dp -= delta[:, None]
        is_data = MASK.HAS_KEYS or MASK.BY_PAIR
        masked = is_data or ((kv < full_first) | (kv >= full_end))
        if masked:
            keep = visible(data, b, hq, queries, keys, of_queries, of_keys, tile_schedule, MASK.HAS_KEYS, False, MASK)
            keep = keep & (lse != float("inf"))[:, None]  # rows that see no key may hold anything
            p, dp = tl.where(keep, p, 0.0), tl.where(keep, dp, 0.0)
        total = tl.math.fma(p, dp, total)
    return total
