"""Packed tile ids, which tell consumers the q tile of a step, and the elementwise test of a band.

Note [Packed tiles of steps]
    A step is known by its *packed tile id*: the q tile, and in bit `MASKED` whether the mask cuts the tile.  Consumers
    have no registers left to compute packed tile ids, and one that loaded a packed tile id from global memory would
    wait for the L2 cache, since a reducer that has acquired its semaphore empties the first one.  So the producer, who
    is a step ahead, puts packed tile ids into shared memory before the dO of their steps is announced.  A band in
    closed form adds what the next step is, see Note [Split loops] in `split_loops`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .....schedule.table_tile_schedule import TILE_BITS
from .operations import here, role_barrier

MASKED = gl.constexpr(2 * TILE_BITS)
"""The bit of a packed tile id that asks for the mask; q tiles are below it, and the sign is above."""
NEXT = gl.constexpr(2 * TILE_BITS - 2)
"""The first of two bits of a packed tile id of a band in closed form: 1 if the next step has `MASKED`, 2 if there is
none.
"""


@gluon.jit
def allocate_int32(STAGES: gl.constexpr):
    """Allocates a ring of STAGES int32 values in shared memory, such as packed tile ids, one for each stage of dO."""
    return gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def put_int32(ring, stage, value):
    """Stores an int32 at index `stage` of a ring, before the dO barrier of this stage is armed; for the producer."""
    ring.index(stage).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + value)
    role_barrier()


@gluon.jit
def read_int32(ring, stage):
    """Reads the int32 at index `stage` of a ring; called by consumers.

    It belongs to the iteration whose dO is in stage `stage` of the ring of dO.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(ring.index(here(stage)).load(layout), 0)


@gluon.jit
def within_band(keep, work, q_row, columns, rows, MASK):
    """Returns `keep`, bool [keys, queries], made false for pairs outside the band.

    q_row: the first query; columns: offsets of all queries from it; rows: the keys.  In the register layout of a
    matmul's result, bits 1 and 2 of a column index depend on the thread and the other bits on the register, so that
    each register is compared with a constant.
    """
    columns = gl.expand_dims(columns, 0)
    registers = columns & ~6
    threads = gl.expand_dims(rows, 1) - (columns & 6)
    if MASK.HAS_LO:
        keep = keep & (registers >= threads + (work.lo - q_row))
    if MASK.HAS_HI:
        keep = keep & (registers <= threads + (work.hi - q_row))
    return keep
