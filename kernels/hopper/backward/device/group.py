"""Grouped-query attention: sums dk and dv of a kv head over the query heads of its group, in the order of the heads.

Every query head has its own CTAs, so that CTAs that run at the same time share a dq accumulator in the L2 cache.  At
the end of its tile schedule the CTA of member m of a group waits for the group's semaphore, as a reducer waits for that
of a q tile; the CTA of member m - 1 for the same kv tile has a lower work id.  The producer does the waiting, since it
is idle during the last iterations, and signals the consumers through a barrier.  Member 0 stores, the others add, the
last one keeps the sum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...shared.device.operations import consumers_release_semaphore, wait_semaphore
from ...shared.device.steps import from_fragments, in_fragments


@gluon.jit
def _place(work, kv):
    """Returns the index of kv tile `kv` of this kv head among the kv tiles of all heads."""
    n_kv = (work.kv_len + work.BLOCK_KV - 1) // work.BLOCK_KV
    return (work.batch * (work.q_heads // work.GROUP) + work.head) * n_kv + kv


@gluon.jit
def wait_for_group(work, kv, semaphores, group_barrier):
    """Waits until the previous members of the group have added their dk and dv, then arrives at `group_barrier`; called
    by the producer.
    """
    wait_semaphore(semaphores + _place(work, kv), work.member)
    mbarrier.arrive(group_barrier, count=1)


@gluon.jit
def add_to_group(work, kv, dk, dk_tail, dv, workspace, shared, phase):
    """Adds dk, dk_tail and dv to the sums of the previous members of the group, and returns the sums.

    Only the last member's result is the complete sum.  workspace: the group `arguments.WORKSPACE`; its group_sums hold
    dv, dk and dk_tail in the order of `in_fragments`.  phase: the parity of `shared.group_barrier` for which to wait.
    """
    TAIL_D: gl.constexpr = shared.TAIL_D
    DV: gl.constexpr = dv.shape[1]
    D: gl.constexpr = dk.shape[1]
    tile = _place(work, kv)
    start = workspace.group_sums + tile.to(gl.int64) * (work.BLOCK_KV * (D + TAIL_D + DV))
    mbarrier.wait(shared.group_barrier.index(0), phase)
    dv = _add(work, dv, start)
    dk = _add(work, dk, start + work.BLOCK_KV * DV)
    if TAIL_D > 0:
        dk_tail = _add(work, dk_tail, start + work.BLOCK_KV * (DV + D))
    consumers_release_semaphore(workspace.group_semaphores + tile, work.member)
    return dk, dk_tail, dv


@gluon.jit
def _add(work, tile, start):
    fragments = in_fragments(tile)
    layout: gl.constexpr = fragments.type.layout
    rows = gl.expand_dims(gl.arange(0, fragments.shape[0], gl.SliceLayout(1, layout)), 1)
    columns = gl.expand_dims(gl.arange(0, fragments.shape[1], gl.SliceLayout(0, layout)), 0)
    pointers = start + (rows * fragments.shape[1] + columns)
    if work.member == 0:
        gl.store(pointers, fragments)
    elif work.member < work.GROUP - 1:
        gl.atomic_add(pointers, fragments, sem="relaxed")  # a reduction at the L2 cache: no loads to wait for
    else:
        fragments += gl.load(pointers, cache_modifier=".cg")
    return from_fragments(fragments, tile)
