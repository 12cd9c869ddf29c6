"""The gradient of a bias for one tile of pairs: dS, summed over batch elements and heads.

As `bias_sums` adds them for the dq kernel, but in registers, and for more programs than that has; with equal bits
unless the mask is dense, where plans of two passes do not use it.
"""

import triton
import triton.language as tl

from .dropout import dropout_kept
from .schedule_functions import dash_kv_range, dash_seen_keys, dash_seen_rows
from .tiles import (
    head_start,
    load_bias,
    load_of_keys,
    load_of_queries,
    load_rows,
    load_shown,
    load_sums,
    load_tile,
    load_valid,
    probabilities,
    visible,
)


@triton.jit
def bias_gradient_tile(
    Q, K, V, DO, LSE, DELTA,
    q_strides, k_strides, v_strides, do_strides, lse_strides, data, drop,
    b_first, hq_first, b_turns, hq_turns, q_tile, kv, heads, walk, scale,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    HAS_DENSE: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDS: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_KV: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """The sum of dS over `b_turns` batch elements from `b_first` on and, within each, `hq_turns` query heads from
    `hq_first` on, in ascending order: fp32 [BLOCK_Q, BLOCK_KV].

    Arguments as for `dkdv_tile`.
    """
    q_len, kv_len, lo, hi = walk
    q_rows = q_tile * BLOCK_Q + tl.arange(0, BLOCK_Q).to(INDEX)
    kv_rows = kv * BLOCK_KV + tl.arange(0, BLOCK_KV).to(INDEX)
    q_first, q_end = dash_seen_rows(walk, BLOCK_Q, BLOCK_KV)
    kv_first, kv_end = dash_seen_keys(walk, BLOCK_Q, BLOCK_KV)
    _first, full_first, full_end, _end = dash_kv_range(q_tile, walk, BLOCK_Q, BLOCK_KV)
    total = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    for turn in tl.range(0, b_turns * hq_turns, num_stages=STAGES):
        b = b_first + turn // hq_turns
        hq = hq_first + turn % hq_turns
        h = hq // GROUP
        q_head, do_head = head_start(Q, b, hq, q_strides), head_start(DO, b, hq, do_strides)
        lse_head = head_start(LSE, b, hq, lse_strides)
        row = (b * heads * GROUP + hq).to(tl.int64)
        do = load_tile(do_head, q_rows, q_first, q_end, do_strides[2], do_strides[3], HEAD_DIM, BLOCK_D, EVEN_Q)
        delta = load_rows(DELTA + row * q_len, q_rows, q_first, q_end, 1, 0.0, EVEN_Q)
        q = load_tile(q_head, q_rows, q_first, q_end, q_strides[2], q_strides[3], HEAD_DIM, BLOCK_D, EVEN_Q)
        q_ids = load_of_queries(data, b, q_rows, q_first, q_end, HAS_SEGMENTS)
        lse, excess = load_sums(lse_head, q_rows, q_first, q_end, q_len, lse_strides[2], EVEN_Q, HAS_BIAS)
        k_head, v_head = head_start(K, b, h, k_strides), head_start(V, b, h, v_strides)
        valid, kv_ids = load_of_keys(data, b, h, kv_rows, kv_first, kv_end, None, HAS_KEYS, HAS_SEGMENTS, 0)
        k = load_valid(
            k_head, kv_rows, kv_first, kv_end, valid, k_strides[2], k_strides[3], HEAD_DIM, BLOCK_D, EVEN_KV, HAS_KEYS
        )
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        v = load_valid(
            v_head, kv_rows, kv_first, kv_end, valid, v_strides[2], v_strides[3], HEAD_DIM, BLOCK_D, EVEN_KV, HAS_KEYS
        )
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        bias = load_bias(data, b, hq, q_rows[:, None], kv_rows[None, :], q_end, kv_end, HAS_BIAS)
        p = probabilities(s, bias, lse[:, None], excess[:, None], scale, HAS_BIAS)
        if ROUNDS:
            dp = tl.where(dropout_kept(drop, b, hq, q_tile, kv, BLOCK_Q, BLOCK_KV, ROUNDS), dp * drop[2], 0.0)
        dp -= delta[:, None]
        masked = HAS_KEYS or HAS_SEGMENTS or HAS_DENSE or ((kv < full_first) | (kv >= full_end))
        if masked:
            shown = load_shown(data, b, hq, q_rows[:, None], kv_rows[None, :], q_end, kv_end, HAS_DENSE)
            keep = visible(
                q_rows[:, None], q_ids[:, None], kv_rows[None, :], kv_ids[None, :], valid[None, :], shown,
                kv_len, lo, hi, HAS_LO, HAS_HI, HAS_KEYS, HAS_SEGMENTS, HAS_DENSE,
            )  # fmt: skip
            keep = keep & (lse != float("inf"))[:, None]  # rows that see no key may hold anything
            p, dp = tl.where(keep, p, 0.0), tl.where(keep, dp, 0.0)
        total = tl.math.fma(p, dp, total)
    return total
