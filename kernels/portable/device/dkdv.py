"""Device code of the dk/dv kernel: dk and dv of one kv tile, and (one pass) the tile's ordered contributions to dq."""

import triton
import triton.language as tl

from ...common.device.ordering import release_semaphore, wait_semaphore
from ...common.device.score import rounded_product, through_bound
from .dropout import dropout_kept, dropout_kept_transposed
from .schedule_functions import dash_q_range, dash_q_tile, dash_rank, dash_seen_keys, dash_seen_rows, dash_visits
from .tiles import (
    by_query,
    head_of,
    id_range,
    in_range,
    load_bias,
    load_chosen,
    load_delta,
    load_k,
    load_of_keys,
    load_of_queries,
    load_rows,
    load_sums,
    load_tile,
    load_v,
    numbers_of,
    pair_products,
    prefetch_bias,
    probabilities,
    rows_of,
    rows_of_keys,
    rows_of_queries,
    visible,
)


@triton.jit
def dkdv_tile(
    inputs, saved, accumulator, data, b, h, kv, tile_schedule, ORDERED: tl.constexpr,
    TILE: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """Returns dk (unscaled) and dv of kv tile `kv` of kv head `h` of batch element `b`.

    They are fp32 [BLOCK_KV, BLOCK_D] and [BLOCK_KV, BLOCK_DV].

    Argument groups are described in Note [Argument groups]; `accumulator` is only used when ORDERED.  The query heads
    of a group are scheduled in ascending order, so dk and dv of grouped heads have a fixed order too.  Rows that see no
    key and keys that no row sees may hold anything: they are not read.

    dk and dv of a key whose entry in `data.keys` is zero are zero.  If ORDERED, the entry must also be zero for keys
    that segments or a dense mask leave without rows, unless they hold finite numbers.  With any data of a mask, the
    log-sum-exp of a row that is left without keys must be -inf, by which the row is known.  Dropout does not change the
    log-sum-exp.

    See Note [Rows of a tile of pairs] for BY_KEY.
    """
    q_len, kv_len, _lo, _hi = tile_schedule
    seen_rows = dash_seen_rows(tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
    seen_keys = dash_seen_keys(tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
    kv_rows = numbers_of(kv, TILE.BLOCK_KV, BUILD)
    k_head, v_head = head_of(inputs.k, b, h), head_of(inputs.v, b, h)
    keys = rows_of(data, kv_rows, seen_keys, kv_len, MASK)
    of_keys = load_of_keys(data, b, h, keys, MASK)
    kv_range = id_range(of_keys.vectors, keys, MASK)
    k = load_k(k_head, keys, of_keys, TILE, MASK)
    v = load_v(v_head, keys, of_keys, TILE, MASK)
    dk = tl.zeros([TILE.BLOCK_KV, TILE.BLOCK_D], tl.float32)
    dv = tl.zeros([TILE.BLOCK_KV, TILE.BLOCK_DV], tl.float32)
    _first, full_first, full_end, _end = dash_q_range(kv, tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
    steps = dash_visits(kv, tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
    n_q = tl.cdiv(q_len, TILE.BLOCK_Q)
    # a mask that is data may leave rows without keys, which are not read; a bias hides nothing
    HIDES_ROWS: tl.constexpr = MASK.HAS_KEYS or MASK.BY_PAIR
    # dk and dv of a key that is not valid are set to zero in the end; only dq is a sum over keys
    ASKS_KEYS: tl.constexpr = MASK.HAS_KEYS and ORDERED
    ALWAYS_MASKED: tl.constexpr = ASKS_KEYS or MASK.BY_PAIR
    MASKED: tl.constexpr = ALWAYS_MASKED or MASK.HAS_LO or MASK.HAS_HI or not TILE.EVEN_KV
    BY_KEY: tl.constexpr = not SCORE.HAS_BIAS
    for g in range(TILE.GROUP):
        hq = h * TILE.GROUP + g
        q_head, do_head, lse_head = head_of(inputs.q, b, hq), head_of(saved.do, b, hq), head_of(saved.lse, b, hq)
        row = (b * saved.heads * TILE.GROUP + hq).to(tl.int64)
        AHEAD: tl.constexpr = 4  # tiles of pairs that are asked for before the loop loads them
        for step in range(tl.minimum(AHEAD, steps)):
            q_tile = dash_q_tile(kv, step, tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
            prefetch_bias(data, b, hq, q_tile, kv, True, tile_schedule, TILE, SCORE, BUILD)
        for step in tl.range(0, steps, num_stages=BUILD.STAGES):
            later, wanted = (
                dash_q_tile(kv, step + AHEAD, tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV),
                step + AHEAD < steps,
            )
            prefetch_bias(data, b, hq, later, kv, wanted, tile_schedule, TILE, SCORE, BUILD)
            q_tile = dash_q_tile(kv, step, tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
            queries = rows_of(data, numbers_of(q_tile, TILE.BLOCK_Q, BUILD), seen_rows, q_len, MASK)
            of_queries = load_of_queries(data, b, queries)
            if HIDES_ROWS:
                nothing = float("-inf")  # the log-sum-exp of a row that sees no key
                seeing = load_rows(lse_head, queries, nothing, TILE.EVEN_Q) != nothing
                seeing = in_range(seeing, of_queries.vectors, kv_range, MASK)
                q = load_chosen(q_head, queries, seeing, TILE.HEAD_DIM, TILE.BLOCK_D)
            else:
                q = load_tile(q_head, queries, TILE.HEAD_DIM, TILE.BLOCK_D, TILE.EVEN_Q)
            lse, excess = load_sums(lse_head, queries, q_len, TILE, SCORE)
            s = pair_products(q, k, BY_KEY, BUILD.PRECISION)
            if HIDES_ROWS:
                do = load_chosen(do_head, queries, seeing, TILE.VALUE_DIM, TILE.BLOCK_DV)
            else:
                do = load_tile(do_head, queries, TILE.VALUE_DIM, TILE.BLOCK_DV, TILE.EVEN_Q)
            delta = load_delta(saved, row, queries, q_len, TILE)
            dp = pair_products(do, v, BY_KEY, BUILD.PRECISION)
            bias = load_bias(data, b, hq, queries, keys, tile_schedule, BY_KEY, SCORE)
            p = probabilities(s, bias, by_query(lse, BY_KEY), by_query(excess, BY_KEY), SCORE)
            masked = ALWAYS_MASKED or ((q_tile < full_first) | (q_tile >= full_end))
            if MASKED and masked:
                keep = visible(data, b, hq, queries, keys, of_queries, of_keys, tile_schedule, ASKS_KEYS, BY_KEY, MASK)
                p = tl.where(keep, p, 0.0)
            if SCORE.ROUNDS:
                if BY_KEY:
                    kept = dropout_kept_transposed(data.drop, b, hq, q_tile, kv, TILE, SCORE)
                else:
                    kept = dropout_kept(data.drop, b, hq, q_tile, kv, TILE, SCORE)
                weights = rows_of_keys(tl.where(kept, p, 0.0).to(do.dtype), BY_KEY)
                dp = tl.where(kept, dp * data.drop.rescale, 0.0)
            else:
                weights = rows_of_keys(p.to(do.dtype), BY_KEY)
            dv = tl.dot(weights, do, dv, input_precision=BUILD.PRECISION)
            ds = rounded_product(p, dp - by_query(delta, BY_KEY), q)
            ds = through_bound(ds, s, q, SCORE)
            if MASKED:
                if masked:  # dP of a pair that the mask keeps apart may be infinite
                    ds = tl.where(p == 0.0, 0.0, ds)
            ds = ds.to(q.dtype)
            dk = tl.dot(rows_of_keys(ds, BY_KEY), q, dk, input_precision=BUILD.PRECISION)
            if ORDERED:
                dq = tl.dot(rows_of_queries(ds, BY_KEY), k, input_precision=BUILD.PRECISION)
                semaphore = accumulator.SEM + row * n_q + q_tile
                rank = dash_rank(q_tile, kv, tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
                wait_semaphore(semaphore, rank, BUILD.INTERPRET)
                cols = tl.arange(0, TILE.BLOCK_D)
                start = accumulator.DQ + row * data.varlen_layout.tokens * TILE.HEAD_DIM
                dq_ptrs = start + queries.tokens[:, None] * TILE.HEAD_DIM + cols[None, :]
                added = in_range(queries.exists, of_queries.vectors, kv_range, MASK)
                inside = added[:, None] & (cols[None, :] < TILE.HEAD_DIM)
                tl.atomic_add(dq_ptrs, dq, mask=inside, sem="relaxed")
                release_semaphore(semaphore, BUILD.INTERPRET)
    if SCORE.ROUNDS:
        dv = dv * data.drop.rescale
    if MASK.HAS_KEYS:
        dk = tl.where(of_keys.valid[:, None], dk, 0.0)
        dv = tl.where(of_keys.valid[:, None], dv, 0.0)
    return dk, dv
