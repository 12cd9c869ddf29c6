"""The reducer role: warps that add dq tiles to the accumulator by rank, so that no matmul waits for global memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....common.device.aggregates import aggregate
from ...shared.device.operations import (
    as_blocks,
    async_reduce_add,
    begin_store,
    release_semaphore,
    wait_semaphore,
    wait_until_read,
)
from ...shared.device.step_signals import DQ_COMPLETE, wait_for_signal
from .work_ids import next_tile_schedule


@aggregate
class Share:
    """The iterations of a CTA that reducer warp number WARP of WARPS serves: WARP, WARP + WARPS, and so on."""

    WARP: gl.constexpr
    WARPS: gl.constexpr


@gluon.jit
def reduce(tile_schedules, stamps, shared, dq_desc, semaphores, share):
    """Runs a reducer: adds the dq tiles of the iterations in `share` to the accumulator, in the order of ranks.

    While one warp waits until its add is performed, another serves the next tile.  The warps need no order among
    themselves, because the semaphores enforce it, see Note [Ordered accumulation on Hopper] in `operations`.
    """
    ROWS: gl.constexpr = shared.dq.shape[1]
    WARPS: gl.constexpr = share.WARPS
    TAIL_ROWS: gl.constexpr = ROWS * shared.TAIL_D // shared.k.shape[1]
    n = 0
    done = 0
    position, kv = next_tile_schedule(shared, n)
    while kv >= 0:
        tile_schedule = tile_schedules.at(position)
        work = tile_schedule.work
        steps = tile_schedule.steps(kv)
        first = done + (share.WARP + WARPS - done % WARPS) % WARPS
        ahead = tile_schedule.begin(first - done, kv)
        for it in range(first, done + steps, WARPS):
            step = it - done
            packed_tile, ahead = tile_schedule.following(ahead, step, step + WARPS, steps, kv)
            rank = tile_schedule.rank(packed_tile, kv)
            tile = work.tile_index(tile_schedule.q_tile(packed_tile))
            stage = it % shared.DQ_STAGES
            row = tile * (ROWS + TAIL_ROWS)
            wait_semaphore(semaphores + tile, rank)
            wait_for_signal(shared, DQ_COMPLETE, it, shared.CONSUMERS)
            _accumulate(dq_desc, row, shared.dq.index(stage), rank)
            if TAIL_ROWS > 0:
                _accumulate(dq_desc, row + ROWS, shared.dq_tail.index(stage), rank)
            added = stamps.now()
            wait_until_read()
            mbarrier.arrive(shared.dq_empty.index(stage), count=1)
            release_semaphore(semaphores + tile, rank)
            stamps.write(work, kv, 1 + tile_schedule.q_tile(packed_tile), 2, added, stamps.now())
        done += steps
        n += 1
        position, kv = next_tile_schedule(shared, n)


@gluon.jit
def _accumulate(desc, row, tile, rank):
    """Starts to store (rank 0) or add the [rows, DQ_ROW] `tile`, block by block."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    blocks = as_blocks(tile, desc)
    for i in gl.static_range(tile.shape[0] // ROWS):
        if rank == 0:
            begin_store(desc, [row + i * ROWS, 0], blocks.index(i))
        else:
            async_reduce_add(desc, [row + i * ROWS, 0], blocks.index(i))
