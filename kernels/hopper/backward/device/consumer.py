"""The consumer role: two warpgroups that compute the matmuls of every iteration and keep dk and dv in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ....common.device.score_gluon import Score
from ...shared.device.operations import role_barrier, wait_for_matmuls, wait_until_read
from ...shared.device.steps import (
    accumulator_layout,
    halved_step,
    left_operand,
    overlapped_step,
    scores,
    shared_step,
    wait_for_do,
    wait_for_q,
    zeros,
)
from ...shared.device.varlen_layout import store_tile
from .group import add_to_group
from .split_loops import first_of_tile_schedule, halved_steps
from .work_ids import leave_tile_schedule, wait_for_tile_schedule


@gluon.jit
def consume(
    tile_schedules, varlen_layout, all_drops, shared, dk_desc, dv_desc, targets, workspace, problem, bound, FORM
):
    """Runs the consumers: computes dk and dv of the kv tile of every work item, and passes a dq tile per iteration to
    the reducers.

    all_drops: `DropoutSigns` or `NoDropout`; bound: the argument group of bounded scores, or None; FORM: see
    `arguments.Form`.
    """
    WARPS: gl.constexpr = shared.CONSUMERS
    STEP: gl.constexpr = FORM.STEP
    AHEAD: gl.constexpr = FORM.AHEAD
    BLOCK_KV: gl.constexpr = tile_schedules.work.BLOCK_KV
    BLOCK_Q: gl.constexpr = tile_schedules.work.BLOCK_Q
    GROUP: gl.constexpr = tile_schedules.work.GROUP
    BLOCK_D: gl.constexpr = shared.k.shape[1]
    BLOCK_DV: gl.constexpr = shared.v.shape[1]
    layout_s: gl.constexpr = accumulator_layout(BLOCK_KV, BLOCK_Q // shared.PIECES, WARPS)
    zero = gl.zeros([BLOCK_KV, BLOCK_Q // shared.PIECES], gl.float32, layout_s)
    score = Score(problem.scale_log2, bound, bound is not None, False, False)
    n = 0
    done = 0
    position, kv = wait_for_tile_schedule(shared, n)
    while kv >= 0:
        tile_schedule = tile_schedules.at(position)
        work = tile_schedule.work
        drops = all_drops.at(work)
        steps = tile_schedule.steps(kv)
        mask = tile_schedule.mask(kv, layout_s)
        dk = zeros(BLOCK_KV, BLOCK_D, WARPS)
        dk_tail = zeros(BLOCK_KV, shared.k_tail.shape[1], WARPS)
        dv = zeros(BLOCK_KV, BLOCK_DV, WARPS)
        s = zero
        k = shared.k
        v = shared.v
        mbarrier.wait(shared.k_full.index(0), n & 1)
        if FORM.LEFT_IN_REGISTERS:
            k = shared.k.load(left_operand(layout_s))
        if AHEAD:
            if steps > 0:
                stage = wait_for_q(shared, done)
                s = wait_for_matmuls(0, deps=(scores(k, shared, stage * shared.PIECES, zero),))
        mbarrier.wait(shared.v_full.index(0), n & 1)
        if FORM.LEFT_IN_REGISTERS:
            v = shared.v.load(left_operand(layout_s))
        SPLITS_LOOPS: gl.constexpr = STEP == "halved" and AHEAD and tile_schedule.SPLITS_LOOPS and not drops.GIVEN
        if SPLITS_LOOPS:
            following = first_of_tile_schedule(shared, mask, done, steps)
        if STEP != "overlapped" or steps == 0:  # overlapped steps do so when they share dS
            # the results of the tile schedule before have left the dq ring, and all meet before it is written
            wait_until_read()
        if SPLITS_LOOPS:
            s, dk, dk_tail, dv = halved_steps(
                shared, mask, drops, score, done, following, s, k, v, dk, dk_tail, dv, zero, WARPS
            )
        else:
            for step in range(steps):
                it = (done + step) & 0x7FFFFFFF  # not negative: the signs of / and % need no correction
                after = it + gl.where(step + 1 < steps, 1, 0)
                if STEP == "overlapped":
                    s, dk, dv = overlapped_step(shared, mask, drops, score, it, after, s, dk, dv, zero, WARPS)
                elif STEP == "halved":
                    if not AHEAD:
                        wait_for_q(shared, it)
                    packed_tile = mask.read_packed_tile(wait_for_do(shared, it))
                    s, dk, dk_tail, dv = halved_step(
                        shared, mask, drops, score, it, after, packed_tile, s, k, v, dk, dk_tail, dv, zero, WARPS,
                        AHEAD, None,
                    )  # fmt: skip
                else:
                    dk, dv = shared_step(shared, mask, drops, score, it, dk, dv, zero, WARPS)
        done += steps
        position, kv = wait_for_tile_schedule(
            shared, n
        )  # again: the steps leave no registers for what they do not need
        tile_schedule = tile_schedules.at(position)
        work = tile_schedule.work
        drops = all_drops.at(work)
        role_barrier()
        if shared.RESULTS_IN_DQ:
            mbarrier.arrive(shared.kv_empty.index(0), count=1)
        if GROUP > 1:
            dk, dk_tail, dv = add_to_group(work, kv, dk, dk_tail, dv, workspace, shared, n & 1)
        if work.member == GROUP - 1:
            store_gradients(
                work, varlen_layout, drops, shared, done, kv, dk_desc, dv_desc, targets, dk, dk_tail, dv,
                problem.scale, WARPS,
            )  # fmt: skip
        role_barrier()
        if not shared.RESULTS_IN_DQ:
            mbarrier.arrive(shared.kv_empty.index(0), count=1)
        leave_tile_schedule(shared, n)
        n += 1
        position, kv = wait_for_tile_schedule(shared, n)
    leave_tile_schedule(shared, n)
    wait_until_read()


@gluon.jit
def store_gradients(
    work, varlen_layout, drops, shared, it, kv, dk_desc, dv_desc, targets, dk, dk_tail, dv, scale,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Rounds dk and dv of kv tile `kv` to 16 bits and starts to store them.

    dk is multiplied by `scale`, and with dropout dv by the factor of kept probabilities.  They pass through the stages
    of the dq ring for iterations `it` and after.  If these are too small, they pass through the tiles of K and V, which
    are no longer needed, and the function waits until the stores have read them.
    """
    DTYPE: gl.constexpr = shared.k.dtype
    row = kv * work.BLOCK_KV
    dv_tile = shared.result_tile(it, 0) if shared.RESULTS_IN_DQ else shared.v
    dv_tile.store(drops.rescaled(dv).to(DTYPE))
    fence_async_shared()
    role_barrier()
    store_tile(varlen_layout, targets.dv, dv_desc, work.batch, work.head, row, dv_tile, WARPS)
    # Meanwhile the stage of the last dq tile may have been emptied.
    dk_tile = shared.result_tile(it, 1) if shared.RESULTS_IN_DQ else shared.k
    dk_tile.store((dk * scale).to(DTYPE))
    if shared.TAIL_D > 0:
        shared.k_tail.store((dk_tail * scale).to(DTYPE))
    fence_async_shared()
    role_barrier()
    store_tile(varlen_layout, targets.dk, dk_desc, work.batch, work.head, row, dk_tile, WARPS)
    if shared.TAIL_D > 0:
        store_tile(
            varlen_layout, targets.dk, dk_desc, work.batch, work.head, row, shared.k_tail, WARPS, shared.k.shape[1]
        )  # fmt: skip
    if not shared.RESULTS_IN_DQ:
        wait_until_read()
