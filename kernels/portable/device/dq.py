"""The q-stationary part of the two-pass backward: delta and dq of one q tile, and its part of a bias's gradient."""

import triton
import triton.language as tl

from .bias_sums import add_to_sum
from .delta import delta_tile
from .dropout import dropout_kept
from .schedule_functions import dash_kv_range, dash_seen_keys, dash_seen_rows
from .tiles import (
    head_start,
    id_range,
    in_range,
    load_bias,
    load_of_keys,
    load_of_queries,
    load_queries,
    load_shown,
    load_sums,
    load_valid,
    place_rows,
    prefetch_bias,
    probabilities,
    rounded_product,
    visible,
)


@triton.jit
def dq_tile(
    Q, K, V, OUT, DO, LSE, DELTA,
    q_strides, k_strides, v_strides, out_strides, do_strides, lse_strides, data, drop,
    b, hq, q_tile, heads, walk, scale, sums,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    HAS_DENSE: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDS: tl.constexpr, GRADIENT: tl.constexpr, ADDS: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_KV: tl.constexpr, PLACED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    INDEX: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """dq of q tile `q_tile` of query head `hq` of batch element `b`: fp32 [BLOCK_Q, BLOCK_D], scaled.

    Arguments as for `dkdv_tile`; OUT: the forward's output, shaped and typed like Q.  Also writes delta, which is
    rowsum(out * do), to DELTA (fp32 [batch, q heads, q_len]) for the dk/dv kernel that runs afterwards.  dq of a row
    whose log-sum-exp is -inf, which sees no key, is zero.

    sums (GRADIENT): where dS of each tile of pairs that the walk visits is added, see `bias_sums`.
    """
    q_len, kv_len, lo, hi = walk
    h = hq // GROUP
    q_rows = q_tile * BLOCK_Q + tl.arange(0, BLOCK_Q).to(INDEX)
    q_first, q_end = dash_seen_rows(walk, BLOCK_Q, BLOCK_KV)
    kv_first, kv_end = dash_seen_keys(walk, BLOCK_Q, BLOCK_KV)
    q_tokens, exists = place_rows(data, q_rows, q_len, PLACED)
    delta, do = delta_tile(
        OUT, DO, out_strides, do_strides, b, hq, q_rows, q_first, q_end, q_tokens, exists, HEAD_DIM, BLOCK_D, EVEN_Q,
        PLACED,
    )  # fmt: skip
    row = (b * heads * GROUP + hq).to(tl.int64)
    tl.store(DELTA + row * q_len + q_rows, delta, mask=q_rows < q_len)
    q_head, lse_head = head_start(Q, b, hq, q_strides), head_start(LSE, b, hq, lse_strides)
    q = load_queries(
        q_head, q_rows, q_first, q_end, q_tokens, exists, q_strides[2], q_strides[3], HEAD_DIM, BLOCK_D, EVEN_Q, PLACED
    )
    q_ids = load_of_queries(data, b, q_rows, q_first, q_end, HAS_SEGMENTS)
    q_low, q_high = id_range(q_ids, exists, PLACED)
    lse, excess = load_sums(lse_head, q_rows, q_first, q_end, q_len, lse_strides[2], EVEN_Q, HAS_BIAS)
    k_head, v_head = head_start(K, b, h, k_strides), head_start(V, b, h, v_strides)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    first, full_first, full_end, end = dash_kv_range(q_tile, walk, BLOCK_Q, BLOCK_KV)
    CHOOSES: tl.constexpr = HAS_KEYS or PLACED > 0
    AHEAD: tl.constexpr = 4  # tiles of pairs that are asked for before the loop loads them
    for kv in range(first, tl.minimum(first + AHEAD, end)):
        prefetch_bias(data, b, hq, q_tile, kv, True, q_len, kv_len, BLOCK_Q, BLOCK_KV, HAS_BIAS, INDEX, INTERPRET)
    for kv in tl.range(first, end, num_stages=STAGES):
        later, wanted = kv + AHEAD, kv + AHEAD < end
        prefetch_bias(data, b, hq, q_tile, later, wanted, q_len, kv_len, BLOCK_Q, BLOCK_KV, HAS_BIAS, INDEX, INTERPRET)
        kv_rows = kv * BLOCK_KV + tl.arange(0, BLOCK_KV).to(INDEX)
        kv_tokens, has_token = place_rows(data, kv_rows, kv_len, PLACED)
        valid, kv_ids = load_of_keys(data, b, h, kv_rows, kv_first, kv_end, has_token, HAS_KEYS, HAS_SEGMENTS, PLACED)
        valid = in_range(valid, kv_ids, q_low, q_high, PLACED)
        k = load_valid(
            k_head, kv_tokens, kv_first, kv_end, valid, k_strides[2], k_strides[3], HEAD_DIM, BLOCK_D, EVEN_KV, CHOOSES
        )
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        v = load_valid(
            v_head, kv_tokens, kv_first, kv_end, valid, v_strides[2], v_strides[3], HEAD_DIM, BLOCK_D, EVEN_KV, CHOOSES
        )
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        bias = load_bias(data, b, hq, q_rows[:, None], kv_rows[None, :], q_end, kv_end, HAS_BIAS)
        p = probabilities(s, bias, lse[:, None], excess[:, None], scale, HAS_BIAS)
        if ROUNDS:
            dp = tl.where(dropout_kept(drop, b, hq, q_tile, kv, BLOCK_Q, BLOCK_KV, ROUNDS), dp * drop[2], 0.0)
        dp -= delta[:, None]
        ds = rounded_product(p, dp, k)
        masked = HAS_KEYS or HAS_SEGMENTS or HAS_DENSE or ((kv < full_first) | (kv >= full_end))
        if (HAS_LO or HAS_HI or HAS_KEYS or HAS_SEGMENTS or HAS_DENSE or not EVEN_KV) and masked:
            shown = load_shown(data, b, hq, q_rows[:, None], kv_rows[None, :], q_end, kv_end, HAS_DENSE)
            keep = visible(
                q_rows[:, None], q_ids[:, None], kv_rows[None, :], kv_ids[None, :], valid[None, :], shown,
                kv_len, lo, hi, HAS_LO, HAS_HI, HAS_KEYS, HAS_SEGMENTS, HAS_DENSE,
            )  # fmt: skip
            ds = tl.where(keep, ds, 0.0)
            if GRADIENT:
                keep = keep & (lse != float("inf"))[:, None]  # rows that see no key may hold anything
                p, dp = tl.where(keep, p, 0.0), tl.where(keep, dp, 0.0)
        if GRADIENT:
            add_to_sum(
                sums,
                p,
                dp,
                q_tile,
                kv,
                q_rows,
                kv_rows,
                q_len,
                kv_len,
                later,
                wanted,
                BLOCK_Q,
                BLOCK_KV,
                ADDS,
                INTERPRET,
            )
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    if HAS_BIAS:
        dq = tl.where((lse != float("inf"))[:, None], dq, 0.0)
    elif HAS_KEYS or HAS_SEGMENTS or HAS_DENSE:
        dq = tl.where((lse != float("-inf"))[:, None], dq, 0.0)
    return dq * scale
