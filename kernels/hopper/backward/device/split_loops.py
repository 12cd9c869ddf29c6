"""Loops over the steps of a kv tile: one loop for steps that the mask cuts, one for steps that it does not cut.

Note [Split loops]
    ptxas moves nothing past a branch.  If a step has a branch around its mask, exponentials and roundings are not
    spread among the matmuls, and every step pays for what few of them need.  Bands in closed form cut the first and the
    last steps of a tile schedule.  So these have a loop of their own, and the step itself has no branch.

    There must be two loops, not two branches in one: ptxas (of CUDA 12.8) shares the address of the second half of dO
    between two branches, and computes it in one of them only.

    A loop has to know the kind of the next step before the packed tile id of that step has arrived.  So the packed tile
    id of a step says so, see `packed_tiles`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...shared.device.packed_tiles import MASKED, NEXT
from ...shared.device.steps import halved_step, wait_for_do


@gluon.jit
def first_of_tile_schedule(shared, mask, done, steps):
    """Returns the kind of a kv tile's first iteration: 1 if the mask cuts it, 0 if not, 2 if there is no iteration.

    done: the number of iterations that the CTA has done before.  All warps must meet between this and the iterations:
    otherwise Triton would make them meet in every iteration, because they wait at the same mbarrier again.
    """
    first = 2
    if steps > 0:
        first = mask.read_packed_tile(wait_for_do(shared, done)) >> MASKED
    return first


@gluon.jit
def halved_steps(
    shared, mask, drops, score, done, following, s, k, v, dk, dk_tail, dv, zero, WARPS: gl.constexpr
):  # fmt: skip
    """Runs all iterations of a kv tile, each a `halved_step` with AHEAD; returns (s, dk, dk_tail, dv).

    done: the number of iterations that the CTA has done before; following: the kind of the first iteration, see
    `first_of_tile_schedule`; s: the S of its first half.
    """
    it = done
    while following != 2:
        while following == 0:
            s, dk, dk_tail, dv, following = _step(
                shared, mask, drops, score, it, s, k, v, dk, dk_tail, dv, zero, WARPS, False
            )
            it += 1
        while following == 1:
            s, dk, dk_tail, dv, following = _step(
                shared, mask, drops, score, it, s, k, v, dk, dk_tail, dv, zero, WARPS, True
            )
            it += 1
    return s, dk, dk_tail, dv


@gluon.jit
def _step(
    shared, mask, drops, score, it, s, k, v, dk, dk_tail, dv, zero, WARPS: gl.constexpr, CUT: gl.constexpr
):  # fmt: skip
    """Returns (S of the iteration after `it`, dk, dk_tail, dv, kind of that iteration)."""
    it = it & 0x7FFFFFFF  # not negative: the signs of / and % need no correction
    packed_tile = mask.read_packed_tile(wait_for_do(shared, it))
    following = (packed_tile >> NEXT) & 3
    after = it + 1 - (following >> 1)
    s, dk, dk_tail, dv = halved_step(
        shared, mask, drops, score, it, after, packed_tile, s, k, v, dk, dk_tail, dv, zero, WARPS, True, CUT
    )
    return s, dk, dk_tail, dv, following
