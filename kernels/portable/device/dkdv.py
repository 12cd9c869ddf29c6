"""The kv-stationary part: dk and dv of one kv tile, and (one pass) its ordered contributions to dq."""

import triton
import triton.language as tl

from ...common.device.ordering import pass_turn_on, wait_for_turn
from .dropout import dropout_kept, dropout_kept_transposed
from .schedule_functions import dash_q_range, dash_q_tile, dash_rank, dash_seen_keys, dash_seen_rows, dash_visits
from .tiles import (
    by_key,
    by_query,
    head_start,
    id_range,
    in_range,
    load_bias,
    load_chosen,
    load_of_keys,
    load_of_queries,
    load_rows,
    load_shown,
    load_sums,
    load_tile,
    load_valid,
    pair_products,
    place_rows,
    prefetch_bias,
    probabilities,
    rounded_product,
    rows_of_keys,
    rows_of_queries,
    visible,
)


@triton.jit
def dkdv_tile(
    Q, K, V, DO, LSE, DELTA, DQ, SEM,
    q_strides, k_strides, v_strides, do_strides, lse_strides, data, drop,
    b, h, kv, heads, walk, scale,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    HAS_DENSE: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDS: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_KV: tl.constexpr, ORDERED: tl.constexpr, PLACED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, INDEX: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """dk (unscaled) and dv of kv tile `kv` of kv head `h` of batch element `b`: fp32 [BLOCK_KV, BLOCK_D] each.

    heads: kv heads of a batch element; walk: (q_len, kv_len, lo, hi), see `schedule_functions`.

    Q, DO: [batch, heads * GROUP, q_len, HEAD_DIM]; K, V: [batch, heads, kv_len, HEAD_DIM]; strides (b, h, row, column).
    LSE: natural log, fp32 [batch, heads * GROUP, >= q_len], any strides; DELTA: fp32 [batch, heads * GROUP, q_len].
    DQ: fp32 [batch, heads * GROUP, q_len, HEAD_DIM], unscaled; SEM: int32 [batch, heads * GROUP, q tiles]; both zeroed,
    and only used when ORDERED (see Note [Ordered accumulation]).  The query heads of a group are walked in ascending
    order, so dk and dv of grouped heads have a fixed order too.  Rows that see no key and keys that no row sees may
    hold anything: they are not read.

    data: what the mask reads, see Note [Data operands].  dk and dv of a key whose entry in KEYS is zero are zero.  If
    ORDERED, KEYS must also be zero for keys that segments or a dense mask leave without rows, unless they hold finite
    numbers.  With any data, the log-sum-exp of a row that is left without keys must be -inf, by which the row is known.

    drop (with ROUNDS of Philox, 0 without dropout): (seed, threshold, rescale) of dropout, see `dropout`; the
    log-sum-exp is the same without it.

    See Note [Rows of a tile of pairs] for BY_KEY.
    """
    q_len, kv_len, lo, hi = walk
    _keys, _ids, _dense, _bias, placed = data
    _place, _count, tokens = placed
    kv_rows = kv * BLOCK_KV + tl.arange(0, BLOCK_KV).to(INDEX)
    q_first, q_end = dash_seen_rows(walk, BLOCK_Q, BLOCK_KV)
    kv_first, kv_end = dash_seen_keys(walk, BLOCK_Q, BLOCK_KV)
    k_head, v_head = head_start(K, b, h, k_strides), head_start(V, b, h, v_strides)
    kv_tokens, has_token = place_rows(data, kv_rows, kv_len, PLACED)
    valid, kv_ids = load_of_keys(data, b, h, kv_rows, kv_first, kv_end, has_token, HAS_KEYS, HAS_SEGMENTS, PLACED)
    CHOOSES: tl.constexpr = HAS_KEYS or PLACED > 0
    kv_low, kv_high = id_range(kv_ids, has_token, PLACED)
    k = load_valid(
        k_head, kv_tokens, kv_first, kv_end, valid, k_strides[2], k_strides[3], HEAD_DIM, BLOCK_D, EVEN_KV, CHOOSES
    )
    v = load_valid(
        v_head, kv_tokens, kv_first, kv_end, valid, v_strides[2], v_strides[3], HEAD_DIM, BLOCK_D, EVEN_KV, CHOOSES
    )
    dk = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
    _first, full_first, full_end, _end = dash_q_range(kv, walk, BLOCK_Q, BLOCK_KV)
    steps = dash_visits(kv, walk, BLOCK_Q, BLOCK_KV)
    n_q = tl.cdiv(q_len, BLOCK_Q)
    # a mask that is data may leave rows without keys, which are not read; a bias hides nothing
    HIDES_ROWS: tl.constexpr = HAS_KEYS or HAS_SEGMENTS or HAS_DENSE
    # dk and dv of a key that is not valid are set to zero in the end; only dq is a sum over keys
    ASKS_KEYS: tl.constexpr = HAS_KEYS and ORDERED
    ALWAYS_MASKED: tl.constexpr = ASKS_KEYS or HAS_SEGMENTS or HAS_DENSE
    MASKED: tl.constexpr = ALWAYS_MASKED or HAS_LO or HAS_HI or not EVEN_KV
    BY_KEY: tl.constexpr = not HAS_BIAS
    for g in range(GROUP):
        hq = h * GROUP + g
        q_head, do_head = head_start(Q, b, hq, q_strides), head_start(DO, b, hq, do_strides)
        lse_head = head_start(LSE, b, hq, lse_strides)
        row = (b * heads * GROUP + hq).to(tl.int64)
        AHEAD: tl.constexpr = 4  # tiles of pairs that are asked for before the loop loads them
        for step in range(tl.minimum(AHEAD, steps)):
            q_tile = dash_q_tile(kv, step, walk, BLOCK_Q, BLOCK_KV)
            prefetch_bias(data, b, hq, q_tile, kv, True, q_len, kv_len, BLOCK_Q, BLOCK_KV, HAS_BIAS, INDEX, INTERPRET)
        for step in tl.range(0, steps, num_stages=STAGES):
            later, wanted = dash_q_tile(kv, step + AHEAD, walk, BLOCK_Q, BLOCK_KV), step + AHEAD < steps
            prefetch_bias(data, b, hq, later, kv, wanted, q_len, kv_len, BLOCK_Q, BLOCK_KV, HAS_BIAS, INDEX, INTERPRET)
            q_tile = dash_q_tile(kv, step, walk, BLOCK_Q, BLOCK_KV)
            q_rows = q_tile * BLOCK_Q + tl.arange(0, BLOCK_Q).to(INDEX)
            q_tokens, exists = place_rows(data, q_rows, q_len, PLACED)
            q_ids = load_of_queries(data, b, q_rows, q_first, q_end, HAS_SEGMENTS)
            if HIDES_ROWS:
                nothing = float("-inf")  # the log-sum-exp of a row that sees no key
                seeing = load_rows(lse_head, q_rows, q_first, q_end, lse_strides[2], nothing, EVEN_Q) != nothing
                seeing = in_range(seeing, q_ids, kv_low, kv_high, PLACED)
                q = load_chosen(q_head, q_tokens, seeing, q_strides[2], q_strides[3], HEAD_DIM, BLOCK_D)
            else:
                q = load_tile(q_head, q_rows, q_first, q_end, q_strides[2], q_strides[3], HEAD_DIM, BLOCK_D, EVEN_Q)
            lse, excess = load_sums(lse_head, q_rows, q_first, q_end, q_len, lse_strides[2], EVEN_Q, HAS_BIAS)
            s = pair_products(q, k, BY_KEY, PRECISION)
            if HIDES_ROWS:
                do = load_chosen(do_head, q_tokens, seeing, do_strides[2], do_strides[3], HEAD_DIM, BLOCK_D)
            else:
                do = load_tile(do_head, q_rows, q_first, q_end, do_strides[2], do_strides[3], HEAD_DIM, BLOCK_D, EVEN_Q)
            delta = load_rows(DELTA + row * q_len, q_rows, q_first, q_end, 1, 0.0, EVEN_Q)
            dp = pair_products(do, v, BY_KEY, PRECISION)
            of_rows, of_keys = by_query(q_rows, BY_KEY), by_key(kv_rows, BY_KEY)
            bias = load_bias(data, b, hq, of_rows, of_keys, q_end, kv_end, HAS_BIAS)
            p = probabilities(s, bias, by_query(lse, BY_KEY), by_query(excess, BY_KEY), scale, HAS_BIAS)
            masked = ALWAYS_MASKED or ((q_tile < full_first) | (q_tile >= full_end))
            if MASKED and masked:
                shown = load_shown(data, b, hq, of_rows, of_keys, q_end, kv_end, HAS_DENSE)
                keep = visible(
                    of_rows, by_query(q_ids, BY_KEY), of_keys, by_key(kv_ids, BY_KEY), by_key(valid, BY_KEY), shown,
                    kv_len, lo, hi, HAS_LO, HAS_HI, ASKS_KEYS, HAS_SEGMENTS, HAS_DENSE,
                )  # fmt: skip
                p = tl.where(keep, p, 0.0)
            if ROUNDS:
                if BY_KEY:
                    kept = dropout_kept_transposed(drop, b, hq, q_tile, kv, BLOCK_Q, BLOCK_KV, ROUNDS)
                else:
                    kept = dropout_kept(drop, b, hq, q_tile, kv, BLOCK_Q, BLOCK_KV, ROUNDS)
                weights = rows_of_keys(tl.where(kept, p, 0.0).to(do.dtype), BY_KEY)
                dp = tl.where(kept, dp * drop[2], 0.0)
            else:
                weights = rows_of_keys(p.to(do.dtype), BY_KEY)
            dv = tl.dot(weights, do, dv, input_precision=PRECISION)
            ds = rounded_product(p, dp - by_query(delta, BY_KEY), q)
            if MASKED:
                if masked:  # dP of a pair that the mask keeps apart may be infinite
                    ds = tl.where(p == 0.0, 0.0, ds)
            ds = ds.to(q.dtype)
            dk = tl.dot(rows_of_keys(ds, BY_KEY), q, dk, input_precision=PRECISION)
            if ORDERED:
                dq = tl.dot(rows_of_queries(ds, BY_KEY), k, input_precision=PRECISION)
                semaphore = SEM + row * n_q + q_tile
                turn = dash_rank(q_tile, kv, walk, BLOCK_Q, BLOCK_KV)
                wait_for_turn(semaphore, turn, INTERPRET)
                cols = tl.arange(0, BLOCK_D)
                dq_ptrs = DQ + row * tokens * HEAD_DIM + q_tokens[:, None] * HEAD_DIM + cols[None, :]
                added = in_range(exists, q_ids, kv_low, kv_high, PLACED)
                inside = added[:, None] & (cols[None, :] < HEAD_DIM)
                tl.atomic_add(dq_ptrs, dq, mask=inside, sem="relaxed")
                pass_turn_on(semaphore, INTERPRET)
    if ROUNDS:
        dv = dv * drop[2]
    if HAS_KEYS:
        dk = tl.where(valid[:, None], dk, 0.0)
        dv = tl.where(valid[:, None], dv, 0.0)
    return dk, dv
