"""The iterations of a row block: scores, softmax, and the product of probabilities and values.

Note [Softmax]
    A row keeps its base m, the largest ``scale * score`` so far in base 2, and its sum of ``exp2(scale * score - m)``.
    m begins with the lowest finite fp32, not with -inf, so that no difference is ever -inf - -inf: a masked score is
    -inf, its probability ``exp2(-inf - m)`` is exactly zero in every row, and a row whose sum stays zero has seen no
    key.

    The factor of what was before a step is ``exp2(m_before - m)``, of the same rounded bases that the probabilities
    use.  It is exactly one where a tile does not raise the base, so that a tile in which a row sees no key leaves the
    row as it is, bit for bit: which kv tiles the other rows of the row block see does not matter to it.

    Scores that a low bound keeps near zero need no maximum: the base is zero from the beginning, every factor is one,
    and neither is computed; sums are by matmuls, see Note [Sums] in `sums`.  The powers of such scores are far from the
    ends of the range of fp32 and bf16, see `model.attention_spec.LOW_SOFTCAP`, not of that of fp16.

    ``max(score) * scale`` is the largest ``score * scale`` only for a positive scale; the host sees to that, see
    `launch.prepare`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ....common.device.relations.between import keep_between
from ...shared.device.operations import ARRIVALS_MEET, COMPUTES_EARLY, not_before, role_barrier
from ...shared.device.steps import accumulator_layout, left_operand
from .seen import ask, hide
from .sums import begin_sums
from .tile_work import ROWS

LOWEST = gl.constexpr(-3.4028234663852886e38)
"""The lowest finite fp32."""


@gluon.jit
def exp2(x):
    """Computes exp2 in one instruction; results below 2**-126 are flushed to zero, which saves a rescaling."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2(x):
    """Computes log2 in one instruction, accurate to 2**-22; log2(0) is -inf."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def wait_for(full, it, STAGES: gl.constexpr):
    """Waits until the it-th tile of a ring of STAGES stages has arrived, and returns its stage.

    full: the ring's mbarriers.
    """
    stage = it % STAGES
    mbarrier.wait(full.index(stage), (it // STAGES) & 1)
    return stage


@gluon.jit
def release(empty):
    """Arrives at the mbarrier `empty` once all warps of this consumer have read the tile: it may be overwritten."""
    if not ARRIVALS_MEET:
        role_barrier()
    mbarrier.arrive(empty, count=1)


@gluon.jit
def softmax(work, score, s, far, m, total, HIDES: gl.constexpr):
    """Returns (P, new row maximum, new row sums, factor of earlier sums and outputs); see Note [Softmax].

    P: fp32 [ROWS, columns], relative to the new maximum; the others are fp32 [ROWS].  s, far: scores as `Score.begun`
    returns them; m, total: row maximum and row sums before; HIDES: a mask may have hidden some of s.
    """
    p, base, shrink = probabilities(work, score, s, far, m, HIDES)
    return p, base, sum_with(score, p, total, shrink), shrink


@gluon.jit
def probabilities(work, score, s, far, m, HIDES: gl.constexpr):
    """Returns P relative to the new row maximum, this maximum, and the factor that rescales earlier sums and outputs.

    The arguments are those of `softmax`.  Fused multiply-adds are explicit, here and in `sum_with`, so that every build
    rounds alike.
    """
    if score.FIXED_BASE:
        base = gl.zeros_like(m)
        shrink = base + 1.0
    else:
        base = gl.maximum(m, score.of_largest(row_maxima(work, score, s), HIDES))
        shrink = exp2(m - base)
    if score.BOUNDED:
        p = score.powers(s, far, gl.expand_dims(base, 1), HIDES)
    else:
        p = exp2(gl.fma(s, score.factor, -gl.expand_dims(base, 1)))
    return p, base, shrink


@gluon.jit
def row_maxima(work, score, s):
    """Returns the largest number of each row of `s`, fp32 [ROWS, columns].

    A thread holds two adjacent columns of every eight.  It takes the maxima of the first ones and of the second ones by
    turns: in one sequence, as a single reduction is compiled, every comparison waits for the one before.  Where matmuls
    compute the row sums, the single reduction was 1 % faster without a mask, for which no reason is known, and spills
    less with segment ids; so there it is replaced for plain bands alone, which have half tiles.
    """
    if score.SUMS_BY_MATMUL and not work.HALF_TILES:
        return gl.max(s, 1)
    else:
        pairs = gl.max(s.reshape([s.shape[0], s.shape[1] // 8, 8]), 1)
        return gl.convert_layout(gl.max(pairs, 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def sum_with(score, p, total, shrink):
    """Returns the row sums of the softmax, fp32 [ROWS], after the probabilities `p` have been added.

    total: the sums before, which are multiplied by `shrink`, the factor of the new maximum.  If matmuls compute row
    sums (Note [Sums] in `sums`), `total` is returned unchanged.
    """
    if score.SUMS_BY_MATMUL:
        return total
    else:
        return gl.fma(total, shrink, gl.sum(p, 1))


@gluon.jit
def masked(work, data, s, segment_ids, element, rows, kv):
    """Returns scores of kv tile `kv`, or of its first keys, with -inf where band or relations hide the key from the
    row.

    element: see `listed.ListedMask.element_of`; rows: the queries; segment_ids: see `listed.ListedMask.hide`.
    """
    if COMPUTES_EARLY:
        kv = not_before(kv)
    if (work.HAS_LO or work.HAS_HI or not work.EVEN_KV) and not data.MASK.HAS_RANGES:
        s = _in_band(work, s, rows, kv)
    if len(data.MASK.FORMS) > 0:
        s = data.hide(work, s, segment_ids, element, rows, kv)
    return s


@gluon.jit
def _in_band(work, s, rows, kv):
    keys = gl.expand_dims(kv * work.BLOCK_KV + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)), 0)
    end = gl.full([ROWS], 0, gl.int32, rows.type.layout) + work.kv_len
    if work.HAS_LO:
        end = gl.minimum(end, rows - work.lo + 1)
    end = gl.expand_dims(end, 1)
    if work.HAS_HI:
        return keep_between(s, keys, gl.expand_dims(rows - work.hi, 1), end)
    return _keep_below(s, keys, end)


@gluon.jit
def _keep_below(s, keys, end):
    """Returns s where ``keys < end``, else -inf.

    It is one operation, because ptxas would compute all comparisons first and pack their results as bits of integers.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred %keep;
        setp.lt.s32 %keep, $2, $3;
        selp.f32 $0, $1, 0fFF800000, %keep;
        }""",
        "=f,f,r,r",
        [s, keys, end],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def as_left(p, DTYPE: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns P, rounded to DTYPE, in the register layout of the left operand of a matmul with COLUMNS columns."""
    layout: gl.constexpr = left_operand(accumulator_layout(ROWS, COLUMNS, 4))
    return gl.convert_layout(p.to(DTYPE), layout, assert_trivial=True)


@gluon.jit
def begin_scores(shared, q_tile, stage, zero):
    """Issues the asynchronous matmul S = Q K^T with tile `q_tile` of the Q ring and the K tile in stage `stage`.

    zero: fp32 [ROWS, keys], one column for each key to be computed; the K tile may have more.
    """
    k = first_keys(shared.k.index(stage), zero.shape[1]).permute((1, 0))
    s = warpgroup_mma(shared.q.index(q_tile), k, zero, use_acc=False, is_async=True)
    if shared.TAIL_D > 0:
        k_tail = first_keys(shared.k_tail.index(stage), zero.shape[1]).permute((1, 0))
        s = warpgroup_mma(shared.q_tail.index(q_tile), k_tail, s, is_async=True)
    return s


@gluon.jit
def first_keys(tile, COUNT: gl.constexpr):
    """Returns the first COUNT rows of a K tile in shared memory, as a view."""
    if tile.shape[0] > COUNT:
        tile = tile.slice(0, COUNT)
    return tile


@gluon.jit
def skip(shared, it):
    """Waits for K and V of the CTA's it-th kv tile and releases them unread."""
    release(shared.k_empty.index(wait_for(shared.k_full, it, shared.STAGES)))
    release(shared.v_empty.index(wait_for(shared.v_full, it, shared.STAGES)))


@gluon.jit
def first_step(work, data, drops, shared, score, zero, here, kv, masks, it, m, total):
    """Returns (P, m, total, shrink) after the first kv tile of a tile schedule; its product P V is left to the next
    step.

    P is in fp32.  here: (batch element, query head, row block, its rows, its tile in the Q ring, dropout seed, first
    padded row of its document); masks: whether the kv tile needs an elementwise mask; it: the number of the kv tile in
    the CTA; shrink: the factor of earlier sums and outputs.
    """
    b, head, block, rows, q_tile, _seed, _first_row = here
    segment_ids = None
    if data.HAS_DENSE:
        shown = ask(work, data, b, head, block, kv, masks)
    elif data.SEGMENT_IDS_AHEAD > 0:
        segment_ids = data.segment_ids(work, zero, data.element_of(b, head), rows, kv)
    stage = wait_for(shared.k_full, it, shared.STAGES)
    s = begin_scores(shared, q_tile, stage, zero)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(shared.k_empty.index(stage))
    HIDES: gl.constexpr = work.HAS_LO or work.HAS_HI or not work.EVEN_KV or data.GIVEN
    s, far = score.begun(s, HIDES)
    if data.HAS_DENSE:
        if masks:
            s = hide(s, shown)
    elif HIDES:
        if masks:
            s = masked(work, data, s, segment_ids, data.element_of(b, head), rows, kv)
    return softmax(work, score, s, far, m, total, HIDES)


@gluon.jit
def next_step(work, data, drops, shared, score, zero, here, kv_before, kv, masks, it, p, acc, m, total):
    """Returns (P, acc, m, total) after computing S and P of kv tile `kv`, and the product P V of the tile `kv_before`.

    While S is computed, dropout is applied to P: bits are used as they are drawn, and the matmuls of the product follow
    one another.  ptxas spreads other instructions among matmuls, and a tensor core would wait for them: the waits at
    barriers before and after dropout keep it in its place.

    ptxas moves the last wait up to the first, so that a consumer's matmuls run during the softmax of the others, not
    during its own, which was faster than keeping the waits apart.

    here, masks: see `first_step`; masks is a constant.
    """
    b, head, block, rows, q_tile, seed, first_row = here
    segment_ids = None
    if masks and data.HAS_DENSE:
        shown = ask(work, data, b, head, block, kv, True)
    elif masks and data.SEGMENT_IDS_AHEAD > 1:
        segment_ids = data.segment_ids(work, zero, data.element_of(b, head), rows, kv)
    stage = wait_for(shared.k_full, it, shared.STAGES)
    s = begin_scores(shared, q_tile, stage, zero)
    if drops.GIVEN:
        wait_for(shared.k_full, it, shared.STAGES)  # it is full; what may branch keeps bits and matmuls apart
        p = drops.kept(p, drops.bits(seed, b, head, first_row, block, kv_before, work.BLOCK_KV))
    before = wait_for(shared.v_full, it - 1, shared.STAGES)
    total = begin_sums(score, shared, p, total)
    acc = warpgroup_mma(p, shared.v.index(before), acc, is_async=True)
    if score.SUMS_BY_MATMUL:
        s, total = warpgroup_mma_wait(1, deps=(s, total))
    else:
        s = warpgroup_mma_wait(1, deps=(s,))
    release(shared.k_empty.index(stage))
    s, far = score.begun(s, masks)
    if data.HAS_DENSE and masks:
        s = hide(s, shown)
    elif masks:
        if data.GIVEN:  # the registers of P have to hold segment ids
            acc = warpgroup_mma_wait(0, deps=(acc,))
        s = masked(work, data, s, segment_ids, data.element_of(b, head), rows, kv)
    p, m, total, shrink = softmax(work, score, s, far, m, total, masks)
    p = as_left(p, shared.k.dtype, shared.v.shape[2])
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))  # P too: it crosses the loop as it is, packed
    release(shared.v_empty.index(before))
    if not score.FIXED_BASE:
        acc = scaled(acc, shrink)
        if score.SUMS_BY_MATMUL:
            total = scaled(total, shrink)
    return p, acc, m, total


@gluon.jit
def scaled(acc, factor):
    """Returns `acc` with each row multiplied by its element of `factor`."""
    return acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout)), 1)


@gluon.jit
def last_product(work, drops, shared, score, here, kv, it, p, acc, total):
    """Issues the product P V of a tile schedule's last kv tile, the CTA's it-th; returns (V's stage, acc, total)."""
    if drops.GIVEN:
        b, head, block, _rows, _q_tile, seed, first_row = here
        p = drops.kept(p, drops.bits(seed, b, head, first_row, block, kv, work.BLOCK_KV))
    stage = wait_for(shared.v_full, it, shared.STAGES)
    total = begin_sums(score, shared, p, total)
    acc = warpgroup_mma(p, shared.v.index(stage), acc, is_async=True)
    if score.SUMS_BY_MATMUL:
        total = warpgroup_mma_wait(1, deps=(total,))
    return stage, acc, total
