"""Timestamps of each step of a tile schedule, recorded by the kernel itself for timelines of real runs.

`Stamps` writes the times, and `NoStamps` replaces it in kernels that record none; the warp roles call either.  The
consumers take no part: their code is the same with stamps and without.  A role of its own, the stamper, waits for the
same barriers as they do, and the reducers stamp their own work.

Note [Stamps]
    A step has four times, in nanoseconds of ``%globaltimer``.  All SMs share this clock, and it does not follow their
    frequency, as ``%clock64`` does, of which every SM has its own; how often it ticks depends on the GPU.

    * start: the consumers have left the step before it, and its dO, the last operand to be asked for, is there;
    * wait: the consumers have left it, so its dq tile is complete and waits for its semaphore;
    * added: the semaphore is at its rank and the add to global memory has been issued;
    * end: the add has been performed and the semaphore released.

    A barrier has two parities, so whoever waits for it must not fall two phases behind.  The producer therefore refills
    the place of a step only when the stamper has stamped it (`noted`): until then, the dO of the step STAGES later
    cannot arrive, and consumers cannot signal the end of that step.

    A read of the clock just after a named barrier is not delayed by the barrier (observed on an H200), so the stamper
    reads it after the next access to shared memory, its arrival at `noted`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import globaltimer, smid

from ....common.device.aggregates import aggregate
from ...shared.device.step_signals import NOTED, wait_for_signal
from .work_ids import next_tile_schedule


@aggregate
class NoStamps:
    """The stand-in for `Stamps` in kernels that record no timestamps."""

    GIVEN: gl.constexpr = False

    @gluon.jit
    def wait_until_noted(self, it):
        """Does nothing, because there is no stamper to wait for."""

    @gluon.jit
    def now(self):
        return 0

    @gluon.jit
    def write(self, work, kv, entry, FIRST: gl.constexpr, a, b):
        """Does nothing, because no timestamps are recorded."""

    @gluon.jit
    def begin(self, work, kv, work_id):
        """Does nothing, because no work ids are recorded."""


@aggregate
class Stamps:
    """Writes the timestamps of the CTA's steps, see Note [Stamps].

    arguments: the group `arguments.STAMPS`.  Its pointer is to int64 [heads, n_kv, 1 + n_q, 4], zeros at first, where
    heads are the query heads of all batch elements.  Entry 1 + q of a kv tile holds the times of the step of q tile
    `q`, entry 0 the work id and the SM of its tile schedule.  Only the first `heads` query heads are stamped.  noted: a
    ring of mbarriers, one per stage, at which the stamper arrives.
    """

    arguments: gl.tuple
    noted: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    GIVEN: gl.constexpr = True

    @gluon.jit
    def wait_until_noted(self, it):
        """Waits until the stamper has recorded iteration ``it - STAGES``."""
        mbarrier.wait(self.noted.index(it % self.STAGES), ((it // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def now(self):
        return globaltimer()

    @gluon.jit
    def write(self, work, kv, entry, FIRST: gl.constexpr, a, b):
        """Writes `a` and `b` as numbers FIRST and FIRST + 1 of an entry of kv tile `kv`, if the head is stamped."""
        head = work.batch * work.q_heads + work.q_head()
        n_kv = (work.kv_len + work.BLOCK_KV - 1) // work.BLOCK_KV
        place = self.arguments.pointer + (((head * n_kv + kv) * (1 + work.n_q) + entry) * 4 + FIRST)
        gl.store(place, a, mask=head < self.arguments.heads)
        gl.store(place + 1, b, mask=head < self.arguments.heads)

    @gluon.jit
    def begin(self, work, kv, work_id):
        """Records, in entry 0 of kv tile `kv`, the work id and the SM that compute it."""
        self.write(work, kv, 0, 0, work_id, smid())


@gluon.jit
def stamp_steps(tile_schedules, shared, stamps):
    """Runs the stamper, a role of one warp: records the times start and wait of every iteration, see Note [Stamps]."""
    n = 0
    done = 0
    position, kv = next_tile_schedule(shared, n)
    while kv >= 0:
        tile_schedule = tile_schedules.at(position)
        steps = tile_schedule.steps(kv)
        ahead = tile_schedule.begin(0, kv)
        for step in range(steps):
            packed_tile, ahead = tile_schedule.following(ahead, step, step + 1, steps, kv)
            it = done + step
            stage = it % shared.STAGES
            mbarrier.wait(shared.do_full.index(stage), (it // shared.STAGES) & 1)
            start = stamps.now()
            wait_for_signal(shared, NOTED, it, shared.CONSUMERS)
            mbarrier.arrive(stamps.noted.index(stage), count=1)
            wait = stamps.now()
            stamps.write(tile_schedule.work, kv, 1 + tile_schedule.q_tile(packed_tile), 0, start, wait)
        done += steps
        n += 1
        position, kv = next_tile_schedule(shared, n)
