"""Device code of the two-pass dq kernel: delta and dq of one q tile, and the tile's part of a bias gradient."""

import triton
import triton.language as tl

from ...common.device.score import rounded_product, through_bound
from .bias_sums import add_to_sum
from .delta import delta_tile
from .dropout import dropout_kept
from .schedule_functions import dash_kv_range, dash_seen_keys, dash_seen_rows
from .tiles import (
    head_of,
    id_range,
    keys_in_range,
    load_bias,
    load_k,
    load_of_keys,
    load_of_queries,
    load_q,
    load_sums,
    load_v,
    numbers_of,
    prefetch_bias,
    probabilities,
    rows_of,
    visible,
)


@triton.jit
def dq_tile(
    inputs, made, saved, data, b, hq, q_tile, tile_schedule, sums, GRADIENT: tl.constexpr, ADDS: tl.constexpr,
    TILE: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """Returns dq of q tile `q_tile` of query head `hq` of batch element `b`: fp32 [BLOCK_Q, BLOCK_D], scaled.

    The arguments are as for `dkdv_tile`; made: see `Made`.  The function also writes delta for the dk/dv kernel that
    runs afterwards.  dq of a row whose log-sum-exp is -inf, which sees no key, is zero.

    GRADIENT: whether the bias has a gradient; then dS of each visited tile of pairs is added to `sums` or, if not ADDS,
    stored there; see `bias_sums`.
    """
    q_len, kv_len, _lo, _hi = tile_schedule
    h = hq // TILE.GROUP
    seen_rows = dash_seen_rows(tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
    seen_keys = dash_seen_keys(tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
    queries = rows_of(data, numbers_of(q_tile, TILE.BLOCK_Q, BUILD), seen_rows, q_len, MASK)
    delta, do = delta_tile(made, saved.do, b, hq, queries, TILE, MASK, SCORE)
    row = (b * saved.heads * TILE.GROUP + hq).to(tl.int64)
    tl.store(saved.DELTA + row * q_len + queries.numbers, delta, mask=queries.numbers < q_len)
    q_head, lse_head = head_of(inputs.q, b, hq), head_of(saved.lse, b, hq)
    q = load_q(q_head, queries, TILE, MASK)
    of_queries = load_of_queries(data, b, queries)
    q_range = id_range(of_queries.vectors, queries, MASK)
    lse, excess = load_sums(lse_head, queries, q_len, TILE, SCORE)
    k_head, v_head = head_of(inputs.k, b, h), head_of(inputs.v, b, h)
    dq = tl.zeros([TILE.BLOCK_Q, TILE.BLOCK_D], tl.float32)
    first, full_first, full_end, end = dash_kv_range(q_tile, tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
    IS_DATA: tl.constexpr = MASK.HAS_KEYS or MASK.BY_PAIR
    AHEAD: tl.constexpr = 4  # tiles of pairs that are asked for before the loop loads them
    for kv in range(first, tl.minimum(first + AHEAD, end)):
        prefetch_bias(data, b, hq, q_tile, kv, True, tile_schedule, TILE, SCORE, BUILD)
    for kv in tl.range(first, end, num_stages=BUILD.STAGES):
        later, wanted = kv + AHEAD, kv + AHEAD < end
        prefetch_bias(data, b, hq, q_tile, later, wanted, tile_schedule, TILE, SCORE, BUILD)
        keys = rows_of(data, numbers_of(kv, TILE.BLOCK_KV, BUILD), seen_keys, kv_len, MASK)
        of_keys = keys_in_range(load_of_keys(data, b, h, keys, MASK), q_range, MASK)
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
        ds = through_bound(rounded_product(p, dp, k), s, k, SCORE)
        masked = IS_DATA or ((kv < full_first) | (kv >= full_end))
        if (MASK.HAS_LO or MASK.HAS_HI or IS_DATA or not TILE.EVEN_KV) and masked:
            keep = visible(data, b, hq, queries, keys, of_queries, of_keys, tile_schedule, MASK.HAS_KEYS, False, MASK)
            ds = tl.where(keep, ds, 0.0)
            if GRADIENT:
                keep = keep & (lse != float("inf"))[:, None]  # rows that see no key may hold anything
                p, dp = tl.where(keep, p, 0.0), tl.where(keep, dp, 0.0)
        if GRADIENT:
            add_to_sum(sums, p, dp, q_tile, kv, queries, keys, tile_schedule, later, wanted, ADDS, TILE, BUILD)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=BUILD.PRECISION)
    if SCORE.HAS_BIAS:
        dq = tl.where((lse != float("inf"))[:, None], dq, 0.0)
    elif IS_DATA:
        dq = tl.where((lse != float("-inf"))[:, None], dq, 0.0)
    return dq * SCORE.SCALE
