"""Signals that consumers give at the end of a step, without waiting for each other: dq tile complete, stage free.

Note [Signals of consumers]
    Consumers speak through named barriers of the hardware: all their threads and the warp that listens meet at one, but
    only that warp waits.  An mbarrier would make them wait: Gluon lets one thread of a role arrive at it, so the others
    would have to meet that thread before.  Each warpgroup goes on as soon as it is done itself, and the matmuls of one
    fill the time in which the other has none.

    A step's dq tile is complete before the step ends: the reducer gets a signal when it may add it, and the producer
    later, when the matmuls have read Q and dO of the step too.  With stamps, the stamper gets one with the producer.

    A number is used again STAGES steps later.  No consumer arrives there before the warp that listens has left it: a
    reducer has emptied the stage of the dq tile by then, producer and stamper have made room for the later step.  No
    warpgroup is a whole step ahead of the other, because both wait for the whole dS of every step.

    After the last step of a tile schedule an S that nobody needs may still read its Q when there is room for another
    one.  With two stages that is the Q of the second step of the next tile schedule: before it the producer asks for K
    of that tile schedule, for which there is room when all matmuls of this one are done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .operations import arrive_at, meet_at

DQ_COMPLETE = gl.constexpr(8)
"""The first of the named barriers for reducers; Triton takes the first numbers, one for a role of several warps."""
ROOM = gl.constexpr(10)
NOTED = gl.constexpr(12)
MOST_STAGES = 2
"""Steps that may be under way, for which there are numbers."""


@gluon.jit
def signal(shared, FIRST: gl.constexpr, it, WARPS: gl.constexpr):
    """Arrives at the named barrier of step `it`, without waiting; called by all consumers after the work that it
    signals.

    FIRST: the number of the first of `shared.STAGES` named barriers, which steps use in turn.  WARPS: the number of
    consumer warps.
    """
    arrive_at(FIRST + it % shared.STAGES, 32 * (WARPS + 1))


@gluon.jit
def wait_for_signal(shared, FIRST: gl.constexpr, it, WARPS: gl.constexpr):
    """Wait until all consumer warps have signalled the end of step `it`; called by a role of one warp.

    FIRST: the number of the first of `shared.STAGES` named barriers, which steps use in turn.  WARPS: the number of
    consumer warps; the waiting warp and they meet at the barrier.
    """
    meet_at(FIRST + it % shared.STAGES, 32 * (WARPS + 1))
