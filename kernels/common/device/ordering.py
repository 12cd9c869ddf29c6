"""Semaphores: waiting for a rank and releasing the next one, which makes dq accumulation follow the planned order.

Note [Ordered accumulation]
    Every (batch, query head, q tile) has a semaphore that counts the contributions already added to its fp32 dQ tile.
    The contributor of rank r

        1. spins on ``ld.acquire.gpu`` until the semaphore is r.  Every thread polls for itself, so each thread has
           acquired everything that was released before: no CTA barrier is needed before its adds.
        2. adds its tile with relaxed atomic fp32 adds whose results are unused (performed at L2; nothing is loaded, so
           the pipeliner cannot move a load of the accumulator above the wait).
        3. meets all threads of the CTA at ``bar.sync 0``: the adds of all threads happen before what follows.
        4. lets one thread do ``red.release.gpu.add 1``.  Release is cumulative over the barrier, so a thread that
           acquires r + 1 sees all adds of rank r.

    Hence the adds to one element happen in rank order, and fp32 addition in a fixed order gives fixed bits.  Steps 1, 3
    and 4 are inline assembly because a `while` loop or `tl.debug_barrier` in the loop switches the pipeliner off.

Note [Forward progress]
    A CTA takes a work id on entry, so the CTAs with all lower work ids are running or finished.  In a
    launch-ordered schedule every wait is for a lower work id; by induction over work ids every CTA finishes, on any
    number of SMs.  A schedule that also waits for higher work ids is launched cooperatively: all CTAs are resident or
    the launch fails.  Work ids and semaphores are zeroed by the call itself; an aborted launch cannot poison the next.

The interpreter runs programs one after the other, so a wait that is not yet satisfied is an error there; it is
asserted.
"""

import triton
import triton.language as tl


@triton.jit
def wait_semaphore(semaphore, rank, INTERPRET: tl.constexpr):
    """Blocks until `semaphore` (int32) equals `rank`."""
    if INTERPRET:
        tl.assume(tl.load(semaphore) == rank)  # the interpreter asserts it, always; device_assert it ignores
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred waiting;
            SPIN:
            ld.acquire.gpu.global.b32 $0, [$1];
            setp.lt.s32 waiting, $0, $2;
            @waiting bra SPIN;
            }""",
            "=r,l,r",
            [semaphore, rank],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def release_semaphore(semaphore, INTERPRET: tl.constexpr):
    """Increments `semaphore` (int32) once all earlier adds of this CTA are visible, so that the next rank may add."""
    if INTERPRET:
        tl.store(semaphore, tl.load(semaphore) + 1)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first; .reg .u32 thread;
            bar.sync 0;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first red.release.gpu.global.add.u32 [$1], 1;
            mov.u32 $0, 0;
            }""",
            "=r,l",
            [semaphore],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
