"""Work ids: a CTA takes one after the other, and its producer announces their work items to the other warp roles.

The producer takes a work id once it has requested everything that the previous one needs, so a CTA holds the work id
that its consumers work on and at most one more.  It announces work item n of the CTA, a kv tile of a head, in the n-th
entry of a ring.  The other roles read and release the entry, and may be one work item later than the producer.  An
entry past the last work item ends their loops.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...shared.device.operations import role_barrier
from ...shared.device.packed_tiles import put_int32, read_int32
from ...shared.device.shared_memory import ENTRIES


@gluon.jit
def take_work_id(work_id_ptr):
    return gl.atomic_add(work_id_ptr, 1, sem="relaxed")


@gluon.jit
def wait_until_left(shared, n):
    """Waits until all roles have released work item ``n - ENTRIES``, whose ring entry work item `n` gets."""
    mbarrier.wait(shared.tile_schedule_empty.index(n % ENTRIES), ((n // ENTRIES) & 1) ^ 1)


@gluon.jit
def announce(shared, n, position, kv):
    """Announces to the other roles that work item `n` of the CTA is kv tile `kv` of the head at `position`.

    position: the head's index in the launch order; kv: -1 after the last work item.
    """
    entry = n % ENTRIES
    wait_until_left(shared, n)
    put_int32(shared.tile_schedules, entry * 2, position)
    put_int32(shared.tile_schedules, entry * 2 + 1, kv)
    mbarrier.arrive(shared.tile_schedule_full.index(entry), count=1)


@gluon.jit
def wait_for_tile_schedule(shared, n):
    """Waits until work item `n` has been announced, and returns its (position of the head in the launch order, kv
    tile).

    The kv tile is negative after the last work item.  All warps of a role must meet before it releases the entry.
    """
    entry = n % ENTRIES
    mbarrier.wait(shared.tile_schedule_full.index(entry), (n // ENTRIES) & 1)
    return read_int32(shared.tile_schedules, entry * 2), read_int32(shared.tile_schedules, entry * 2 + 1)


@gluon.jit
def leave_tile_schedule(shared, n):
    """Releases the ring entry of work item `n`, so that the producer may write a later item to it; for the other roles.

    All warps of the role must have read the entry (`wait_for_tile_schedule`) before.
    """
    mbarrier.arrive(shared.tile_schedule_empty.index(n % ENTRIES), count=1)


@gluon.jit
def next_tile_schedule(shared, n):
    """Waits for work item `n`, and returns (position of its head in the launch order, kv tile).

    It releases the ring entry of the work item.  It is for roles of one warp, which keep the two numbers in registers.
    """
    position, kv = wait_for_tile_schedule(shared, n)
    role_barrier()
    leave_tile_schedule(shared, n)
    return position, kv
