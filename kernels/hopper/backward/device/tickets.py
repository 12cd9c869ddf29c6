"""Tickets: a CTA takes one after the other, and its producer announces the walks that they stand for.

The producer takes a ticket when it has asked for everything that the walks of the one before need, so that a CTA holds
the ticket that its consumers are at, and at most one more.  It announces walk n of the CTA, a kv tile of a head, in the
n-th entry of a ring; the other roles read it there and leave it, and may be a walk behind the producer.  An entry past
the last walk ends their loops.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...shared.device.operations import role_barrier
from ...shared.device.shared_memory import ENTRIES
from ...shared.device.step_words import put_word, read_word


@gluon.jit
def take_ticket(ticket_ptr):
    return gl.atomic_add(ticket_ptr, 1, sem="relaxed")


@gluon.jit
def wait_until_left(shared, n):
    """Wait until all roles have left walk ``n - ENTRIES``: then there is an entry for walk `n`."""
    mbarrier.wait(shared.walk_empty.index(n % ENTRIES), ((n // ENTRIES) & 1) ^ 1)


@gluon.jit
def announce(shared, n, position, kv):
    """Tell the other roles that walk `n` is of kv tile `kv` of the head at `position`; there is none if `kv` is -1."""
    entry = n % ENTRIES
    wait_until_left(shared, n)
    put_word(shared.walks, entry * 2, position)
    put_word(shared.walks, entry * 2 + 1, kv)
    mbarrier.arrive(shared.walk_full.index(entry), count=1)


@gluon.jit
def wait_for_walk(shared, n):
    """(position, kv tile) of walk `n`; a role lets all its warps meet before it leaves the walk."""
    entry = n % ENTRIES
    mbarrier.wait(shared.walk_full.index(entry), (n // ENTRIES) & 1)
    return read_word(shared.walks, entry * 2), read_word(shared.walks, entry * 2 + 1)


@gluon.jit
def leave_walk(shared, n):
    """Say that the role needs the entry of walk `n` no more.  All of its warps have read it."""
    mbarrier.arrive(shared.walk_empty.index(n % ENTRIES), count=1)


@gluon.jit
def next_walk(shared, n):
    """`wait_for_walk` of a role of one warp that keeps what it has read."""
    position, kv = wait_for_walk(shared, n)
    role_barrier()
    leave_walk(shared, n)
    return position, kv
