"""The portable forward: out and log-sum-exp of one q tile, by a softmax that goes over the kv tiles once.

Note [Bits of the forward]
    One program owns a q tile and visits its kv tiles in ascending order; nothing is split and nothing is added twice.
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

from ...common.device.score import after_slope, biased
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
    load_v,
    numbers_of,
    prefetch_bias,
    row_sums,
    rows_of,
    visible,
)


@triton.jit
def attend_range(
    state, operands, place, own, data, tile_schedule, first, end, MASKED: tl.constexpr, SIGN: tl.constexpr,
    SLOPE: tl.constexpr,
    TILE: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """Returns the online softmax's `state` of a q tile after the kv tiles first .. end-1, visited in ascending order.

    MASKED: whether the mask is applied; it must be if any pair of these tiles may be invisible.

    state: per row the unscaled output, the sum of the probabilities, and the largest score, by whose exponential both
    are divided: fp32 [BLOCK_Q, BLOCK_DV], [BLOCK_Q], [BLOCK_Q].  Scores are in base 2, but with a bias in base e,
    because in base 2 a bias of `finfo.min` would overflow fp32.

    operands: the tile of Q, and the heads of K and V; place: batch element, kv head, query head, q tile; own: the
    tile's `TileRows`, their `OfQueries`, and their `id_range`.  The other arguments are those of `attend_tile`.
    """
    out, total, largest = state
    q, k_head, v_head = operands
    b, h, hq, q_tile = place
    queries, of_queries, q_range = own
    _q_len, kv_len, _lo, _hi = tile_schedule
    seen_keys = dash_seen_keys(tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
    log2e = 1.4426950408889634
    AHEAD: tl.constexpr = 4  # tiles of pairs that are asked for before the loop loads them
    for kv in range(first, tl.minimum(first + AHEAD, end)):
        prefetch_bias(data, b, hq, q_tile, kv, True, tile_schedule, TILE, SCORE, BUILD)
    for kv in tl.range(first, end, num_stages=BUILD.STAGES):
        prefetch_bias(data, b, hq, q_tile, kv + AHEAD, kv + AHEAD < end, tile_schedule, TILE, SCORE, BUILD)
        keys = rows_of(data, numbers_of(kv, TILE.BLOCK_KV, BUILD), seen_keys, kv_len, MASK)
        of_keys = keys_in_range(load_of_keys(data, b, h, keys, MASK), q_range, MASK)
        k = load_k(k_head, keys, of_keys, TILE, MASK)
        s = tl.dot(q, tl.trans(k), input_precision=BUILD.PRECISION)
        if SCORE.HAS_BIAS:
            s = biased(s, load_bias(data, b, hq, queries, keys, tile_schedule, False, SCORE), SCORE)
        else:
            s = after_slope(s, SIGN, SCORE)
        if MASKED:
            keep = visible(data, b, hq, queries, keys, of_queries, of_keys, tile_schedule, MASK.HAS_KEYS, False, MASK)
            s = tl.where(keep, s, float("-inf"))
        top = tl.max(s, 1)
        if not SCORE.HAS_BIAS:
            top = top * SLOPE
        larger = tl.maximum(largest, top)
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # a row that has seen no key yet
        if SCORE.HAS_BIAS:
            p = tl.math.exp2((s - shift[:, None]) * log2e)
            shrink = tl.math.exp2((largest - shift) * log2e)
        else:
            p = tl.math.exp2(tl.math.fma(s, SLOPE, -shift[:, None]))
            shrink = tl.math.exp2(largest - shift)
        if SCORE.HAS_BIAS or len(data.of_pairs) > 0:
            total = tl.math.fma(total, shrink, row_sums(p, TILE.BLOCK_Q, TILE.BLOCK_KV))
        else:
            total = tl.math.fma(total, shrink, tl.sum(p, 1))
        if SCORE.ROUNDS:
            p = tl.where(dropout_kept(data.drop, b, hq, q_tile, kv, TILE, SCORE), p, 0.0)
        v = load_v(v_head, keys, of_keys, TILE, MASK)
        # three matmuls, to whose sum the start value is added
        if BUILD.PRECISION == "tf32x3" and v.dtype == tl.float32:
            out = tl.math.fma(out, shrink[:, None], tl.dot(p, v, input_precision=BUILD.PRECISION))
        else:
            out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision=BUILD.PRECISION)
        largest = larger
    return out, total, largest


@triton.jit
def with_sinks(total, largest, sinks, b, hq, q_rows, q_len, SCORE: tl.constexpr):
    """Adds the attention sinks of a head to the softmax: returns (sum, largest score, factor of the unscaled output).

    total, largest: the sum and the largest score of each row, as in the state of `attend_range`.  sinks: see
    `attend_tile`.
    """
    head = head_of(sinks, b, hq)
    sink = tl.load(head.start + q_rows * head.strides[0], mask=q_rows < q_len, other=0.0)
    log2e = 1.4426950408889634
    if not SCORE.HAS_BIAS:
        sink = sink * log2e
    larger = tl.maximum(largest, sink)
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    if SCORE.HAS_BIAS:
        shrink = tl.math.exp2((largest - shift) * log2e)
        of_sink = tl.math.exp2((sink - shift) * log2e)
    else:
        shrink = tl.math.exp2(largest - shift)
        of_sink = tl.math.exp2(sink - shift)
    return tl.math.fma(total, shrink, of_sink), larger, shrink


@triton.jit
def attend_tile(
    inputs, data, sinks, b, hq, q_tile, tile_schedule, SIGN: tl.constexpr, SLOPE: tl.constexpr,
    TILE: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """Returns (out, log-sum-exp, excess) of q tile `q_tile` of query head `hq` of batch element `b`.

    out: fp32 [BLOCK_Q, BLOCK_DV]; the log-sum-exp is natural, fp32 [BLOCK_Q].  With a bias, it and the excess are the
    two parts of Note [Log-sum-exp in two parts].  A row that sees no key gives zeros and -inf, or its sink, whatever q,
    k and v hold.  Dropout does not change the log-sum-exp.  sinks: fp32 [batch, q heads, q_len], read if
    SCORE.HAS_SINKS.

    Argument groups are described in Note [Argument groups].  Rows that see no key by the band, and keys that no row
    sees by the band or by `data.keys`, are not read.  Hence `data.keys` must also be zero for keys that segments or a
    dense mask leave without rows, unless they hold finite numbers.

    SIGN * SLOPE / log2(e) is `common.score.slope_after_score`: SIGN is 1, -1 or 0, and SLOPE is positive (see
    `templates.signed_slope`).

    The softmax is the online one: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv
    1805.02867, a tile at a time as in FlashAttention, arXiv 2205.14135.  Note [Bits of the forward] says why its bits
    depend on nothing but the operands, the mask and the tile shape.
    """
    q_len, _kv_len, _lo, _hi = tile_schedule
    h = hq // TILE.GROUP
    seen_rows = dash_seen_rows(tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
    q_rows = numbers_of(q_tile, TILE.BLOCK_Q, BUILD)
    q_head = head_of(inputs.q, b, hq)
    queries = rows_of(data, q_rows, seen_rows, q_len, MASK)
    q = load_q(q_head, queries, TILE, MASK)
    operands = q, head_of(inputs.k, b, h), head_of(inputs.v, b, h)
    out = tl.zeros([TILE.BLOCK_Q, TILE.BLOCK_DV], tl.float32)
    total = tl.zeros([TILE.BLOCK_Q], tl.float32)
    largest = tl.full([TILE.BLOCK_Q], float("-inf"), tl.float32)
    state = out, total, largest
    of_queries = load_of_queries(data, b, queries)
    own = queries, of_queries, id_range(of_queries.vectors, queries, MASK)
    place = b, h, hq, q_tile
    first, full_first, full_end, end = dash_kv_range(q_tile, tile_schedule, TILE.BLOCK_Q, TILE.BLOCK_KV)
    if MASK.HAS_KEYS or MASK.BY_PAIR:
        state = attend_range(
            state, operands, place, own, data, tile_schedule, first, end, True, SIGN, SLOPE, TILE, MASK, SCORE, BUILD
        )
    else:
        if MASK.HAS_HI:
            state = attend_range(
                state, operands, place, own, data, tile_schedule, first, full_first, True, SIGN, SLOPE, TILE, MASK,
                SCORE, BUILD,
            )  # fmt: skip
        state = attend_range(
            state, operands, place, own, data, tile_schedule, full_first, full_end, False, SIGN, SLOPE, TILE, MASK,
            SCORE, BUILD,
        )  # fmt: skip
        if MASK.HAS_LO or MASK.HAS_HI or not TILE.EVEN_KV:
            state = attend_range(
                state, operands, place, own, data, tile_schedule, full_end, end, True, SIGN, SLOPE, TILE, MASK, SCORE,
                BUILD,
            )  # fmt: skip
    out, total, largest = state
    if SCORE.HAS_SINKS:
        total, largest, shrink = with_sinks(total, largest, sinks, b, hq, q_rows, q_len, SCORE)
        out = out * shrink[:, None]
    sees = total != 0.0
    total = tl.where(sees, total, 1.0)
    out = tl.where(sees[:, None], out / total[:, None], 0.0)  # zero times a value that others see may be NaN
    if SCORE.ROUNDS:
        out = out * data.drop.rescale
    ln2 = 0.6931471805599453
    excess = tl.math.log2(total)
    if SCORE.HAS_BIAS:
        return out, largest, excess
    else:
        return out, (largest + excess) * ln2, excess
