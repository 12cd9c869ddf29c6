"""The reducers: warps that add dq tiles to the accumulator in rank order, so that no matmul waits for global memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .operations import async_reduce_add, pass_turn_on, wait_for_turn


@gluon.jit
def reduce(work, shared, dq_desc, semaphores, WARP: gl.constexpr):
    """Steps WARP, WARP + WARPS, ... of the walk; see Note [Ordered accumulation on Hopper].

    There is one warp per stage of the dq ring: while one waits until its add is performed, the other serves the next
    tile.  They need no order between them, the semaphores hold it.
    """
    WARPS: gl.constexpr = shared.STAGES
    done = 0
    for part in gl.static_range(work.PARTS):
        kv = work.kv_tile(part)
        steps = work.steps(kv)
        for it in range(done + (WARP + WARPS - done % WARPS) % WARPS, done + steps, WARPS):
            q = work.q_tile(it - done, kv)
            rank = work.rank(q, kv)
            tile = work.tile_index(it - done, q)
            slot = it % shared.STAGES
            row = tile * dq_desc.block_type.shape[0]
            wait_for_turn(semaphores + tile, rank)
            mbarrier.wait(shared.step_done.index(slot), (it // shared.STAGES) & 1)
            if rank == 0:
                tma.async_copy_shared_to_global(dq_desc, [row, 0], shared.dq.index(slot))
            else:
                async_reduce_add(dq_desc, [row, 0], shared.dq.index(slot))
            tma.store_wait(0)  # read, not performed
            mbarrier.arrive(shared.dq_empty.index(slot), count=1)
            pass_turn_on(semaphores + tile, rank)
        done += steps
