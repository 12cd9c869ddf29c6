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

from .operations import role_barrier, store_rows


@gluon.jit
def consume(
    work, shared, dk_desc, dv_desc, scale, scale_log2, HAS_LO: gl.constexpr, HAS_HI: gl.constexpr, EVEN_KV: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, WARPS: gl.constexpr, SHARE_P: gl.constexpr, EARLY_ROWS: gl.constexpr,
):  # fmt: skip
    """dk and dv of the CTA's kv tiles, and a dq tile per step into the dq ring.

    Scores are computed transposed, [BLOCK_KV, BLOCK_Q], so that P and dS are left operands in registers for dV and dK.
    With SHARE_P (head dims where two warpgroups share the 64 rows of a kv tile) they go through shared memory.
    EARLY_ROWS loads lse and delta before the matmul they follow is done; it costs registers.
    """
    BLOCK_Q: gl.constexpr = work.BLOCK_Q
    BLOCK_KV: gl.constexpr = work.BLOCK_KV
    DTYPE: gl.constexpr = shared.k.dtype
    ROWS: gl.constexpr = WARPS if BLOCK_KV >= 16 * WARPS else BLOCK_KV // 16  # warps along the kv rows
    COLS: gl.constexpr = WARPS // ROWS
    Q_ROWS: gl.constexpr = BLOCK_Q // 16
    Q_COLS: gl.constexpr = WARPS // Q_ROWS
    layout_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS, COLS], [16, BLOCK_Q // COLS, 16])
    layout_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS, COLS], [16, BLOCK_D // COLS, 16])
    layout_v: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS, COLS], [16, BLOCK_DV // COLS, 16])
    layout_q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [Q_ROWS, Q_COLS], [16, BLOCK_D // Q_COLS, 16])
    operand_k: gl.constexpr = gl.DotOperandLayout(0, layout_k, 2)
    operand_v: gl.constexpr = gl.DotOperandLayout(0, layout_v, 2)
    columns: gl.constexpr = gl.SliceLayout(0, layout_s)
    zero_s = gl.zeros([BLOCK_KV, BLOCK_Q], gl.float32, layout_s)
    zero_q = gl.zeros([BLOCK_Q, BLOCK_D], gl.float32, layout_q)
    done = 0
    for part in gl.static_range(work.PARTS):
        kv = work.kv_tile(part)
        steps = work.steps(kv)
        full_first, full_end = work.unmasked(kv)
        dk = gl.zeros([BLOCK_KV, BLOCK_D], gl.float32, layout_k)
        dv = gl.zeros([BLOCK_KV, BLOCK_DV], gl.float32, layout_v)
        kv_rows = kv * BLOCK_KV + gl.arange(0, BLOCK_KV, gl.SliceLayout(1, layout_s))
        if steps > 0:
            mbarrier.wait(shared.k_full.index(0), part & 1)
            mbarrier.wait(shared.v_full.index(0), part & 1)
        for step in range(steps):
            it = done + step
            slot = it % shared.STAGES
            phase = (it // shared.STAGES) & 1
            q_tile = work.q_tile(step, kv)
            q = shared.q.index(slot)
            do = shared.do.index(slot)
            mbarrier.wait(shared.q_full.index(slot), phase)
            s = warpgroup_mma(shared.k, q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            mbarrier.wait(shared.do_full.index(slot), phase)
            dp = warpgroup_mma(shared.v, do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            if EARLY_ROWS:
                lse = shared.lse.index(slot).load(columns)
            s = warpgroup_mma_wait(1, deps=(s,))  # dP runs on
            if not EARLY_ROWS:
                lse = shared.lse.index(slot).load(columns)
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
                dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), operand_v, assert_trivial=True), do, dv, is_async=True)
            if EARLY_ROWS:
                delta = shared.delta.index(slot).load(columns)
            dp = warpgroup_mma_wait(1, deps=(dp,))  # dV runs on
            if not EARLY_ROWS:
                delta = shared.delta.index(slot).load(columns)
            ds = (p * (dp - gl.expand_dims(delta, 0))).to(DTYPE)
            shared.ds.store(ds)
            fence_async_shared()
            role_barrier()  # dS is complete
            dq = warpgroup_mma(shared.ds.permute((1, 0)), shared.k, zero_q, use_acc=False, is_async=True)
            if SHARE_P:
                dk = warpgroup_mma(shared.ds, q, dk, is_async=True)
            else:
                dk = warpgroup_mma(gl.convert_layout(ds, operand_k, assert_trivial=True), q, dk, is_async=True)
            dq, dv = warpgroup_mma_wait(1, deps=(dq, dv))  # dK runs on
            buffer = it % shared.DQ_BUFFERS
            mbarrier.wait(shared.dq_empty.index(buffer), ((it // shared.DQ_BUFFERS) & 1) ^ 1)
            shared.dq.index(buffer).store(dq)
            fence_async_shared()
            role_barrier()  # the dq tile is complete, dV has read dO
            mbarrier.arrive(shared.dq_full.index(buffer), count=1)
            mbarrier.arrive(shared.do_empty.index(slot), count=1)
            dk = warpgroup_mma_wait(0, deps=(dk,))  # running on into the next step would make ptxas serialise (C7515)
            role_barrier()
            mbarrier.arrive(shared.q_empty.index(slot), count=1)
        done += steps
        role_barrier()
        if kv * BLOCK_KV < work.kv_len:
            shared.v.store(dv.to(DTYPE))  # K and V are done with: dk and dv are staged in their place
            shared.k.store((dk * scale).to(DTYPE))
            fence_async_shared()
            role_barrier()
            store_rows(dv_desc, work.batch, work.head, kv * BLOCK_KV, shared.v)
            store_rows(dk_desc, work.batch, work.head, kv * BLOCK_KV, shared.k)
            tma.store_wait(0)
        if work.PARTS > 1:
            role_barrier()
            mbarrier.arrive(shared.kv_empty.index(0), count=1)
