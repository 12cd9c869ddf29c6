"""The portable forward: out and log-sum-exp of one q tile, by a softmax that goes over the kv tiles once.

Note [Bits of the forward]
    One program owns a q tile and walks its kv tiles in ascending order; nothing is split and nothing is added twice.
    So the bits of a row follow from a fixed sequence of operations, if the compiler has no choice in any of them:

    1. Every product that is added to something is spelled as a fused multiply-add.  Other products are exact (SIGN),
       only compared (the largest score), or the start value of one matmul, which no multiply-add can absorb.
    2. A tile that the mask does not cut has the same bits whether it is masked or not: a select that lets everything
       pass changes no value, and the scores are fused with the shift after it.  There are separate loops for tiles
       that the mask may cut and for others, without a branch inside: with a branch between the two matmuls, Triton
       would spread the columns of a score tile over other warps, and a row would be summed in another order.
    3. A tile of which a row sees nothing leaves the row as it is: its largest score stays, so `shrink` is exactly 1,
       and zeros are added.

    4. With a bias or a dense mask, a tile of pairs that is loaded may have a layout of its own, which depends on what
       is known of its strides, and scores may take it over.  So there rows are summed by `row_sums`, in the same order
       in any layout; a dense mask that hides nothing does not have the bits of no mask.

    Hence neither EVEN_Q and EVEN_KV, which say what is known of lengths when a graph is compiled, nor the other rows
    of a tile change a bit.  The order inside a matmul or a row's sum follows from the tile shape and the number of
    warps.
"""

import triton
import triton.language as tl

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
    load_valid,
    place_rows,
    prefetch_bias,
    row_sums,
    visible,
)


@triton.jit
def attend_range(
    state, operands, place, first, end, MASKED: tl.constexpr, SCALE: tl.constexpr, SIGN: tl.constexpr,
    SLOPE: tl.constexpr, BLOCK_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_KEYS: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr, HAS_DENSE: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDS: tl.constexpr,
    EVEN_KV: tl.constexpr, PLACED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, INDEX: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """`state` after the kv tiles first .. end-1, in ascending order; MASKED, if any pair of them may be invisible.

    state: per row the unscaled output, the sum of the probabilities, and the largest score, by whose exponential both
    are divided: fp32 [BLOCK_Q, BLOCK_DV], [BLOCK_Q], [BLOCK_Q].  Scores are in base 2; with a bias they are natural, or
    fp32 could not hold a bias of `finfo.min`.  The arguments are those of `attend_tile`, and values that it has
    computed from them.
    """
    out, total, largest = state
    q, k_head, v_head, k_strides, v_strides, data, drop = operands
    b, h, hq, q_tile, q_rows, q_ids, q_range, q_len, q_end, kv_first, kv_end, kv_len, lo, hi = place
    q_low, q_high = q_range
    log2e = 1.4426950408889634
    BLOCK_Q: tl.constexpr = q_rows.shape[0]
    CHOOSES: tl.constexpr = HAS_KEYS or PLACED > 0
    AHEAD: tl.constexpr = 4  # tiles of pairs that are asked for before the loop loads them
    for kv in range(first, tl.minimum(first + AHEAD, end)):
        prefetch_bias(data, b, hq, q_tile, kv, True, q_len, kv_len, BLOCK_Q, BLOCK_KV, HAS_BIAS, INDEX, INTERPRET)
    for kv in tl.range(first, end, num_stages=STAGES):
        later, wanted = kv + AHEAD, kv + AHEAD < end
        prefetch_bias(data, b, hq, q_tile, later, wanted, q_len, kv_len, BLOCK_Q, BLOCK_KV, HAS_BIAS, INDEX, INTERPRET)
        kv_rows = kv * BLOCK_KV + tl.arange(0, BLOCK_KV).to(INDEX)
        kv_tokens, exists = place_rows(data, kv_rows, kv_len, PLACED)
        valid, kv_ids = load_of_keys(data, b, h, kv_rows, kv_first, kv_end, exists, HAS_KEYS, HAS_SEGMENTS, PLACED)
        valid = in_range(valid, kv_ids, q_low, q_high, PLACED)
        k = load_valid(
            k_head, kv_tokens, kv_first, kv_end, valid, k_strides[2], k_strides[3], HEAD_DIM, BLOCK_D, EVEN_KV, CHOOSES
        )
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_BIAS:
            bias = load_bias(data, b, hq, q_rows[:, None], kv_rows[None, :], q_end, kv_end, HAS_BIAS)
            s = tl.math.fma(s, SCALE, bias)
        elif SIGN <= 0:
            s = s * SIGN
        if MASKED:
            shown = load_shown(data, b, hq, q_rows[:, None], kv_rows[None, :], q_end, kv_end, HAS_DENSE)
            keep = visible(
                q_rows[:, None], q_ids[:, None], kv_rows[None, :], kv_ids[None, :], valid[None, :], shown,
                kv_len, lo, hi, HAS_LO, HAS_HI, HAS_KEYS, HAS_SEGMENTS, HAS_DENSE,
            )  # fmt: skip
            s = tl.where(keep, s, float("-inf"))
        top = tl.max(s, 1)
        if not HAS_BIAS:
            top = top * SLOPE
        larger = tl.maximum(largest, top)
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # a row that has seen no key yet
        if HAS_BIAS:
            p = tl.math.exp2((s - shift[:, None]) * log2e)
            shrink = tl.math.exp2((largest - shift) * log2e)
        else:
            p = tl.math.exp2(tl.math.fma(s, SLOPE, -shift[:, None]))
            shrink = tl.math.exp2(largest - shift)
        if HAS_BIAS or HAS_DENSE:
            total = tl.math.fma(total, shrink, row_sums(p, BLOCK_Q, BLOCK_KV))
        else:
            total = tl.math.fma(total, shrink, tl.sum(p, 1))
        if ROUNDS:
            p = tl.where(dropout_kept(drop, b, hq, q_tile, kv, BLOCK_Q, BLOCK_KV, ROUNDS), p, 0.0)
        v = load_valid(
            v_head, kv_tokens, kv_first, kv_end, valid, v_strides[2], v_strides[3], VALUE_DIM, BLOCK_DV, EVEN_KV,
            CHOOSES,
        )  # fmt: skip
        if PRECISION == "tf32x3" and v.dtype == tl.float32:  # of three matmuls, to whose sum the start value is added
            out = tl.math.fma(out, shrink[:, None], tl.dot(p, v, input_precision=PRECISION))
        else:
            out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
        largest = larger
    return out, total, largest


@triton.jit
def attend_tile(
    Q, K, V, q_strides, k_strides, v_strides, data, drop,
    b, hq, q_tile, walk, SCALE: tl.constexpr, SIGN: tl.constexpr, SLOPE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, GROUP: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    HAS_DENSE: tl.constexpr, HAS_BIAS: tl.constexpr, ROUNDS: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_KV: tl.constexpr, PLACED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    INDEX: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """(out, log-sum-exp, excess) of q tile `q_tile` of query head `hq` of batch element `b`.

    out: fp32 [BLOCK_Q, BLOCK_DV]; the log-sum-exp is natural, fp32 [BLOCK_Q].  With a bias, it and the excess are the
    two parts of Note [Log-sum-exp in two parts].  A row that sees no key gives zeros and -inf, whatever q, k and v
    hold.  walk: (q_len, kv_len, lo, hi), see `schedule_functions`.

    Q: [batch, q heads, q_len, HEAD_DIM]; K: [batch, q heads / GROUP, kv_len, HEAD_DIM]; V: [.., kv_len, VALUE_DIM];
    strides (b, h, row, column).  data: what the mask reads, see Note [Data operands].  Rows that see no key by the
    band, and keys that no row sees by the band or by KEYS, are not read.  Hence KEYS must also be zero for keys that
    segments or a dense mask leave without rows, unless they hold finite numbers.  drop (with ROUNDS
    of Philox, 0 without dropout): (seed, threshold, rescale) of dropout, see `dropout`; the log-sum-exp is the same
    without it.

    SCALE is SIGN * SLOPE / log2(e): SIGN is 1, -1 or 0, and SLOPE is positive (see `templates.signed_slope`).

    The softmax is the online one: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv
    1805.02867, a tile at a time as in FlashAttention, arXiv 2205.14135.  Note [Bits of the forward] says why its bits
    depend on nothing but the operands, the mask and the tile shape.
    """
    q_len, kv_len, lo, hi = walk
    h = hq // GROUP
    q_rows = q_tile * BLOCK_Q + tl.arange(0, BLOCK_Q).to(INDEX)
    q_first, q_end = dash_seen_rows(walk, BLOCK_Q, BLOCK_KV)
    kv_first, kv_end = dash_seen_keys(walk, BLOCK_Q, BLOCK_KV)
    q_head = head_start(Q, b, hq, q_strides)
    q_tokens, exists = place_rows(data, q_rows, q_len, PLACED)
    q = load_queries(
        q_head, q_rows, q_first, q_end, q_tokens, exists, q_strides[2], q_strides[3], HEAD_DIM, BLOCK_D, EVEN_Q, PLACED
    )
    k_head, v_head = head_start(K, b, h, k_strides), head_start(V, b, h, v_strides)
    out = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    state = out, total, largest
    q_ids = load_of_queries(data, b, q_rows, q_first, q_end, HAS_SEGMENTS)
    operands = q, k_head, v_head, k_strides, v_strides, data, drop
    q_range = id_range(q_ids, exists, PLACED)
    place = b, h, hq, q_tile, q_rows, q_ids, q_range, q_len, q_end, kv_first, kv_end, kv_len, lo, hi
    first, full_first, full_end, end = dash_kv_range(q_tile, walk, BLOCK_Q, BLOCK_KV)
    if HAS_KEYS or HAS_SEGMENTS or HAS_DENSE:
        state = attend_range(
            state, operands, place, first, end, True, SCALE, SIGN, SLOPE, BLOCK_KV, HEAD_DIM, BLOCK_D, VALUE_DIM,
            BLOCK_DV, HAS_LO, HAS_HI, HAS_KEYS, HAS_SEGMENTS, HAS_DENSE, HAS_BIAS, ROUNDS, EVEN_KV, PLACED, PRECISION,
            STAGES, INDEX, INTERPRET,
        )  # fmt: skip
    else:
        if HAS_HI:
            state = attend_range(
                state, operands, place, first, full_first, True, SCALE, SIGN, SLOPE, BLOCK_KV, HEAD_DIM, BLOCK_D,
                VALUE_DIM, BLOCK_DV, HAS_LO, HAS_HI, HAS_KEYS, HAS_SEGMENTS, HAS_DENSE, HAS_BIAS, ROUNDS, EVEN_KV,
                PLACED, PRECISION, STAGES, INDEX, INTERPRET,
            )  # fmt: skip
        state = attend_range(
            state, operands, place, full_first, full_end, False, SCALE, SIGN, SLOPE, BLOCK_KV, HEAD_DIM, BLOCK_D,
            VALUE_DIM, BLOCK_DV, HAS_LO, HAS_HI, HAS_KEYS, HAS_SEGMENTS, HAS_DENSE, HAS_BIAS, ROUNDS, EVEN_KV,
            PLACED, PRECISION, STAGES, INDEX, INTERPRET,
        )  # fmt: skip
        if HAS_LO or HAS_HI or not EVEN_KV:
            state = attend_range(
                state, operands, place, full_end, end, True, SCALE, SIGN, SLOPE, BLOCK_KV, HEAD_DIM, BLOCK_D,
                VALUE_DIM, BLOCK_DV, HAS_LO, HAS_HI, HAS_KEYS, HAS_SEGMENTS, HAS_DENSE, HAS_BIAS, ROUNDS, EVEN_KV,
                PLACED, PRECISION, STAGES, INDEX, INTERPRET,
            )  # fmt: skip
    out, total, largest = state
    sees = total != 0.0
    total = tl.where(sees, total, 1.0)
    out = tl.where(sees[:, None], out / total[:, None], 0.0)  # zero times a value that others see may be NaN
    if ROUNDS:
        out = out * drop[2]
    ln2 = 0.6931471805599453
    excess = tl.math.log2(total)
    if HAS_BIAS:
        return out, largest, excess
    else:
        return out, (largest + excess) * ln2, excess
