"""The consumers: two warpgroups that do the matmuls of every step and keep dk and dv in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .group import add_to_group
from .operations import role_barrier, store_rows


@gluon.jit
def in_fragments(dq):
    """A [rows, columns] accumulator of matmuls as it lies in registers: [rows * columns / 32, 32].

    16 rows and 8 columns are 128 values, four to a thread: row ``8 h + i``, column ``2 j + e`` is value ``2 h + e`` of
    thread ``4 i + j``.  In that order every thread stores 16 bytes next to its neighbour's, without bank conflicts;
    `finish` undoes it.
    """
    ROWS: gl.constexpr = dq.shape[0]
    COLUMNS: gl.constexpr = dq.shape[1]
    parts = dq.reshape([ROWS // 16, 2, 8, COLUMNS // 8, 4, 2]).permute([0, 3, 2, 4, 1, 5])
    return parts.reshape([ROWS * COLUMNS // 32, 32])


@gluon.jit
def scores(shared, slot, zero):
    """S of the Q tile in `slot`, transposed: begin K Q^T."""
    s = warpgroup_mma(shared.k, shared.q.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    if shared.TAIL_D > 0:
        s = warpgroup_mma(shared.k_tail, shared.q_tail.index(slot).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def half(work, shared, q_slot, do_slot, q_half, full_first, full_end, kv_rows, dk, dk_tail, dv, zero_s, scale_log2,
    HAS_LO: gl.constexpr, HAS_HI: gl.constexpr, EVEN_KV: gl.constexpr, layout_s: gl.constexpr, operand_k: gl.constexpr, operand_t: gl.constexpr, operand_v: gl.constexpr):
    DTYPE: gl.constexpr = shared.k.dtype
    columns: gl.constexpr = gl.SliceLayout(0, layout_s)
    SUB: gl.constexpr = zero_s.shape[1]
    do = shared.do.index(do_slot)
    s = scores(shared, q_slot, zero_s)
    dp = warpgroup_mma(shared.v, do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    lse = shared.lse.index(q_slot).load(columns)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(lse, 0))
    if HAS_LO or HAS_HI or not EVEN_KV:
        q_tile = q_half // 2
        if (q_tile < full_first) | (q_tile >= full_end):
            q_rows = gl.expand_dims(q_half * SUB + gl.arange(0, SUB, columns), 0)
            rows = gl.expand_dims(kv_rows, 1)
            keep = (rows < work.kv_len) & (q_rows >= 0)
            if HAS_LO:
                keep = keep & (q_rows - rows >= work.lo)
            if HAS_HI:
                keep = keep & (q_rows - rows <= work.hi)
            p = gl.where(keep, p, 0.0)
    dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), operand_v, assert_trivial=True), do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    delta = shared.delta.index(do_slot).load(columns)
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(DTYPE)
    left = gl.convert_layout(ds, operand_k, assert_trivial=True)
    dk = warpgroup_mma(left, shared.q.index(q_slot), dk, is_async=True)
    left = gl.convert_layout(ds, operand_t, assert_trivial=True)
    dk_tail = warpgroup_mma(left, shared.q_tail.index(q_slot), dk_tail, is_async=True)
    dv, dk, dk_tail = warpgroup_mma_wait(0, deps=(dv, dk, dk_tail))
    return ds, dk, dk_tail, dv


@gluon.jit
def consume(
    work, shared, dk_desc, dv_desc, group_sums, group_semaphores, scale, scale_log2,
    HAS_LO: gl.constexpr, HAS_HI: gl.constexpr, EVEN_KV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    WARPS: gl.constexpr, SHARE_P: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """dk and dv of the CTA's kv tiles, and a dq tile per step into the dq ring.

    Scores are computed transposed, [BLOCK_KV, BLOCK_Q].  P is a left operand in registers for dV; with SHARE_P (head
    dims where two warpgroups share the 64 rows of a kv tile) it goes through shared memory.  A head dim of q and k that
    is no power of two has its last TAIL_D columns in tiles of their own: K Q^T is a sum over both, dK and dQ come in
    two pieces.

    OVERLAP keeps matmuls queued over the end of a step, so that the tensor cores need not wait for the softmax:

        without OVERLAP             with OVERLAP                         meanwhile
        S, dP                       dP, dK of the step before            softmax
        dV                          dV                                   dS
        dQ, dK                      dQ, S of the step after              dq tile to its buffer

    With it a walk ends with an S of a tile that nobody needs, and begins with a dK of a dS of zeros.  Without it, a
    spare Q tile lets dq go out before dK is done.
    """
    BLOCK_Q: gl.constexpr = work.BLOCK_Q
    BLOCK_KV: gl.constexpr = work.BLOCK_KV
    TAIL: gl.constexpr = shared.TAIL_D
    TAIL_D: gl.constexpr = TAIL if TAIL > 0 else 64  # of tensors that nothing uses
    DTYPE: gl.constexpr = shared.k.dtype
    ROWS: gl.constexpr = WARPS if BLOCK_KV >= 16 * WARPS else BLOCK_KV // 16  # warps along the kv rows
    COLS: gl.constexpr = WARPS // ROWS
    Q_ROWS: gl.constexpr = BLOCK_Q // 16
    Q_COLS: gl.constexpr = WARPS // Q_ROWS
    HALVES: gl.constexpr = 2 if TAIL > 0 else 1
    SUB: gl.constexpr = BLOCK_Q // HALVES
    layout_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS, COLS], [16, SUB // COLS, 16])
    layout_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS, COLS], [16, BLOCK_D // COLS, 16])
    layout_t: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS, COLS], [16, TAIL_D // COLS, 16])
    layout_v: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS, COLS], [16, BLOCK_DV // COLS, 16])
    layout_q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [Q_ROWS, Q_COLS], [16, BLOCK_D // Q_COLS, 16])
    layout_qt: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [Q_ROWS, Q_COLS], [16, TAIL_D // Q_COLS, 16])
    operand_k: gl.constexpr = gl.DotOperandLayout(0, layout_k, 2)
    operand_t: gl.constexpr = gl.DotOperandLayout(0, layout_t, 2)
    operand_v: gl.constexpr = gl.DotOperandLayout(0, layout_v, 2)
    columns: gl.constexpr = gl.SliceLayout(0, layout_s)
    SPARE_Q: gl.constexpr = shared.Q_STAGES > shared.STAGES
    zero_s = gl.zeros([BLOCK_KV, SUB], gl.float32, layout_s)
    zero_q = gl.zeros([BLOCK_Q, BLOCK_D], gl.float32, layout_q)
    zero_qt = gl.zeros([BLOCK_Q, TAIL_D], gl.float32, layout_qt)
    first_slot = 0  # of the Q ring, counted on
    done = 0
    for part in gl.static_range(work.PARTS):
        kv = work.kv_tile(part)
        steps = work.steps(kv)
        full_first, full_end = work.unmasked(kv)
        dk = gl.zeros([BLOCK_KV, BLOCK_D], gl.float32, layout_k)
        dk_tail = gl.zeros([BLOCK_KV, TAIL_D], gl.float32, layout_t)
        dv = gl.zeros([BLOCK_KV, BLOCK_DV], gl.float32, layout_v)
        kv_rows = kv * BLOCK_KV + gl.arange(0, BLOCK_KV, gl.SliceLayout(1, layout_s))
        s = zero_s
        if steps > 0:
            mbarrier.wait(shared.k_full.index(0), part & 1)
            if OVERLAP:
                shared.ds.store(zero_s.to(DTYPE))
                fence_async_shared()
                role_barrier()
                slot = first_slot % shared.Q_STAGES
                mbarrier.wait(shared.q_full.index(slot), (first_slot // shared.Q_STAGES) & 1)
                s = warpgroup_mma_wait(0, deps=(scores(shared, slot, zero_s),))
            mbarrier.wait(shared.v_full.index(0), part & 1)
        for step in range(steps):
            q_it = first_slot + step
            q_slot = q_it % shared.Q_STAGES
            it = done + step
            do_slot = it % shared.STAGES
            dq_slot = it % shared.DQ_STAGES
            q_tile = work.q_tile(step, kv)
            do = shared.do.index(do_slot * HALVES)
            if not OVERLAP:
                mbarrier.wait(shared.q_full.index(q_slot), (q_it // shared.Q_STAGES) & 1)
            if HALVES == 2:
                mbarrier.wait(shared.do_full.index(do_slot), (it // shared.STAGES) & 1)
                ds0, dk, dk_tail, dv = half(
                    work, shared, q_slot * 2, do_slot * 2, q_tile * 2, full_first, full_end, kv_rows, dk, dk_tail, dv, zero_s,
                    scale_log2, HAS_LO, HAS_HI, EVEN_KV, layout_s, operand_k, operand_t, operand_v)
                ds1, dk, dk_tail, dv = half(
                    work, shared, q_slot * 2 + 1, do_slot * 2 + 1, q_tile * 2 + 1, full_first, full_end, kv_rows, dk, dk_tail, dv, zero_s,
                    scale_log2, HAS_LO, HAS_HI, EVEN_KV, layout_s, operand_k, operand_t, operand_v)
                ds = gl.join(ds0, ds1).permute([0, 2, 1]).reshape([BLOCK_KV, BLOCK_Q])
                shared.ds.store(ds)
                fence_async_shared()
                role_barrier()
                dq = warpgroup_mma(shared.ds.permute((1, 0)), shared.k, zero_q, use_acc=False, is_async=True)
                dq_tail = warpgroup_mma(shared.ds.permute((1, 0)), shared.k_tail, zero_qt, use_acc=False, is_async=True)
                dq, dq_tail, dv, dk, dk_tail = warpgroup_mma_wait(0, deps=(dq, dq_tail, dv, dk, dk_tail))
            else:
              if not OVERLAP:
                s = scores(shared, q_slot, zero_s)
              mbarrier.wait(shared.do_full.index(do_slot), (it // shared.STAGES) & 1)
              dp = warpgroup_mma(shared.v, do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
              if OVERLAP:
                  before = gl.maximum(q_it - 1, first_slot) % shared.Q_STAGES
                  dk = warpgroup_mma(shared.ds, shared.q.index(before), dk, is_async=True)
              else:
                  s = warpgroup_mma_wait(1, deps=(s,))
              lse = shared.lse.index(q_slot).load(columns)
              p = gl.exp2(s * scale_log2 - gl.expand_dims(lse, 0))
              if HAS_LO or HAS_HI or not EVEN_KV:
                  if (q_tile < full_first) | (q_tile >= full_end):
                      q_rows = gl.expand_dims(q_tile * BLOCK_Q + gl.arange(0, BLOCK_Q, columns), 0)
                      rows = gl.expand_dims(kv_rows, 1)
                      keep = (rows < work.kv_len) & (q_rows >= 0)
                      if HAS_LO:
                          keep = keep & (q_rows - rows >= work.lo)
                      if HAS_HI:
                          keep = keep & (q_rows - rows <= work.hi)
                      p = gl.where(keep, p, 0.0)
              if SHARE_P:
                  shared.p.store(p.to(DTYPE))
                  fence_async_shared()
                  role_barrier()
                  dv = warpgroup_mma(shared.p, do, dv, is_async=True)
              else:
                  dv = warpgroup_mma(
                      gl.convert_layout(p.to(DTYPE), operand_v, assert_trivial=True), do, dv, is_async=True
                  )
              dp = warpgroup_mma_wait(2 if OVERLAP else 1, deps=(dp,))  # the others run on
              delta = shared.delta.index(do_slot).load(columns)
              ds = (p * (dp - gl.expand_dims(delta, 0))).to(DTYPE)
              if OVERLAP:
                  dk = warpgroup_mma_wait(1, deps=(dk,))  # it has read the dS of the step before
              shared.ds.store(ds)
              fence_async_shared()
              role_barrier()  # dS is complete
              dq = warpgroup_mma(shared.ds.permute((1, 0)), shared.k, zero_q, use_acc=False, is_async=True)
              dq_tail = zero_qt
              if TAIL > 0:
                  dq_tail = warpgroup_mma(
                      shared.ds.permute((1, 0)), shared.k_tail, zero_qt, use_acc=False, is_async=True
                  )
              if OVERLAP:
                  next_it = q_it + 1
                  next_slot = next_it % shared.Q_STAGES
                  mbarrier.wait(shared.q_full.index(next_slot), (next_it // shared.Q_STAGES) & 1)
                  s = scores(shared, next_slot, zero_s)
              elif SHARE_P:
                  dk = warpgroup_mma(shared.ds, shared.q.index(q_slot), dk, is_async=True)
              else:
                  left = gl.convert_layout(ds, operand_k, assert_trivial=True)
                  dk = warpgroup_mma(left, shared.q.index(q_slot), dk, is_async=True)
                  if TAIL > 0:
                      left = gl.convert_layout(ds, operand_t, assert_trivial=True)
                      dk_tail = warpgroup_mma(left, shared.q_tail.index(q_slot), dk_tail, is_async=True)
              if SPARE_Q:
                  dq, dv = warpgroup_mma_wait(1, deps=(dq, dv))
              elif TAIL > 0:
                  dq, dq_tail, dv, dk, dk_tail = warpgroup_mma_wait(0, deps=(dq, dq_tail, dv, dk, dk_tail))
              else:
                  dq, dv, dk = warpgroup_mma_wait(0, deps=(dq, dv, dk))
            mbarrier.wait(shared.dq_empty.index(dq_slot), ((it // shared.DQ_STAGES) & 1) ^ 1)
            shared.dq.index(dq_slot).store(in_fragments(dq))
            if TAIL > 0:
                shared.dq_tail.index(dq_slot).store(in_fragments(dq_tail))
            fence_async_shared()
            role_barrier()
            mbarrier.arrive(shared.step_done.index(do_slot), count=1)
            if OVERLAP:
                s = warpgroup_mma_wait(0, deps=(s,))
            elif SPARE_Q:
                dk = warpgroup_mma_wait(0, deps=(dk,))
        first_slot += steps
        if OVERLAP:
            if steps > 0:
                dk = warpgroup_mma(shared.ds, shared.q.index((first_slot - 1) % shared.Q_STAGES), dk)
                first_slot += 1
        done += steps
        role_barrier()
        if kv * BLOCK_KV < work.kv_len:
            if work.GROUP > 1:
                dk, dk_tail, dv = add_to_group(work, kv, dk, dk_tail, dv, group_sums, group_semaphores, TAIL)
            if work.member == work.GROUP - 1:
                shared.v.store(dv.to(DTYPE))  # K and V are done with: dk and dv are staged in their place
                shared.k.store((dk * scale).to(DTYPE))
                if TAIL > 0:
                    shared.k_tail.store((dk_tail * scale).to(DTYPE))
                fence_async_shared()
                role_barrier()
                store_rows(dv_desc, work.batch, work.head, kv * BLOCK_KV, shared.v)
                store_rows(dk_desc, work.batch, work.head, kv * BLOCK_KV, shared.k)
                if TAIL > 0:
                    store_rows(dk_desc, work.batch, work.head, kv * BLOCK_KV, shared.k_tail, BLOCK_D)
                tma.store_wait(0)
        if work.PARTS > 1:
            role_barrier()
            mbarrier.arrive(shared.kv_empty.index(0), count=1)
