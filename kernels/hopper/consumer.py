"""The consumers: two warpgroups that do the matmuls of every step and keep dk and dv in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .group import add_to_group
from .operations import role_barrier, wait_until_read
from .places import store_tile
from .steps import (
    accumulator_layout,
    halved_step,
    left_operand,
    overlapped_step,
    scores,
    shared_step,
    wait_for_q,
    zeros,
)


@gluon.jit
def consume(
    walk, places, drops, shared, dk_desc, dv_desc, dk_target, dv_target, group_sums, group_semaphores, scale,
    scale_log2, WARPS: gl.constexpr, STEP: gl.constexpr, AHEAD: gl.constexpr, LEFT_IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk and dv of the CTA's kv tiles, and a dq tile per step into the dq ring.

    STEP: the form of a step, see `steps`. AHEAD: a step ends with (a half of) the S of the next, so that a walk begins
    with one of its own. LEFT_IN_REGISTERS: K and V are left operands in registers for the whole walk.
    """
    work = walk.work
    BLOCK_KV: gl.constexpr = work.BLOCK_KV
    BLOCK_D: gl.constexpr = shared.k.shape[1]
    BLOCK_DV: gl.constexpr = shared.v.shape[1]
    DTYPE: gl.constexpr = shared.k.dtype
    layout_s: gl.constexpr = accumulator_layout(BLOCK_KV, work.BLOCK_Q // shared.HALVES, WARPS)
    zero = gl.zeros([BLOCK_KV, work.BLOCK_Q // shared.HALVES], gl.float32, layout_s)
    first_q_it = 0  # of the Q ring, counted on
    done = 0
    walks = 0  # with steps: K and V are loaded for those only
    turns = 0  # of the group
    for part in gl.static_range(work.PARTS):
        kv = work.kv_tile(part)
        steps = walk.steps(kv)
        mask = walk.mask(kv, layout_s)
        dk = zeros(BLOCK_KV, BLOCK_D, WARPS)
        dk_tail = zeros(BLOCK_KV, shared.k_tail.shape[1], WARPS)
        dv = zeros(BLOCK_KV, BLOCK_DV, WARPS)
        s = zero
        k = shared.k
        v = shared.v
        if LEFT_IN_REGISTERS:
            k = gl.zeros([BLOCK_KV, BLOCK_D], DTYPE, left_operand(layout_s))
            v = gl.zeros([BLOCK_KV, BLOCK_DV], DTYPE, left_operand(layout_s))
        if steps > 0:
            mbarrier.wait(shared.k_full.index(0), walks & 1)
            if LEFT_IN_REGISTERS:
                k = shared.k.load(left_operand(layout_s))
            if STEP == "overlapped":
                shared.ds.store(gl.zeros([BLOCK_KV, work.BLOCK_Q], DTYPE, layout_s))
                fence_async_shared()
                role_barrier()
            if AHEAD:
                slot = wait_for_q(shared, first_q_it)
                s = warpgroup_mma_wait(0, deps=(scores(k, shared, slot * shared.HALVES, zero),))
            mbarrier.wait(shared.v_full.index(0), walks & 1)
            if LEFT_IN_REGISTERS:
                v = shared.v.load(left_operand(layout_s))
        for step in range(steps):
            q_it = first_q_it + step
            if STEP == "overlapped":
                s, dk, dv = overlapped_step(
                    shared, mask, drops, scale_log2, q_it, done + step, first_q_it, s, dk, dv, zero, WARPS
                )
            elif STEP == "halved":
                s, dk, dk_tail, dv = halved_step(
                    shared, mask, drops, scale_log2, q_it, done + step, s, k, v, dk, dk_tail, dv, zero, WARPS,
                    AHEAD,
                )  # fmt: skip
            else:
                dk, dv = shared_step(shared, mask, drops, scale_log2, q_it, done + step, dk, dv, zero, WARPS)
        first_q_it += steps
        walks += gl.where(steps > 0, 1, 0)
        if AHEAD:
            if steps > 0:
                if STEP == "overlapped":
                    dk = warpgroup_mma(shared.ds, shared.q.index((first_q_it - 1) % shared.Q_STAGES), dk)
                first_q_it += 1
        done += steps
        role_barrier()
        if kv * BLOCK_KV < work.kv_len:
            if work.GROUP > 1:
                dk, dk_tail, dv = add_to_group(
                    work, kv, dk, dk_tail, dv, group_sums, group_semaphores, shared.turn.index(0), turns & 1,
                    shared.TAIL_D,
                )  # fmt: skip
                turns += 1
            if work.member == work.GROUP - 1:
                store_gradients(
                    work, places, drops, shared, kv, dk_desc, dv_desc, dk_target, dv_target, dk, dk_tail, dv, scale,
                    WARPS,
                )  # fmt: skip
        if work.PARTS > 1:
            role_barrier()
            mbarrier.arrive(shared.kv_empty.index(0), count=1)


@gluon.jit
def store_gradients(
    work, places, drops, shared, kv, dk_desc, dv_desc, dk_target, dv_target, dk, dk_tail, dv, scale, WARPS: gl.constexpr
):  # fmt: skip
    """Round dk and dv and store them, by way of K and V, which are done with."""
    DTYPE: gl.constexpr = shared.k.dtype
    shared.v.store(drops.rescaled(dv).to(DTYPE))
    shared.k.store((dk * scale).to(DTYPE))
    if shared.TAIL_D > 0:
        shared.k_tail.store((dk_tail * scale).to(DTYPE))
    fence_async_shared()
    role_barrier()
    row = kv * work.BLOCK_KV
    store_tile(places, dv_target, dv_desc, work.batch, work.head, row, shared.v, WARPS)
    store_tile(places, dk_target, dk_desc, work.batch, work.head, row, shared.k, WARPS)
    if shared.TAIL_D > 0:
        store_tile(
            places, dk_target, dk_desc, work.batch, work.head, row, shared.k_tail, WARPS, shared.k.shape[1]
        )  # fmt: skip
    wait_until_read()
