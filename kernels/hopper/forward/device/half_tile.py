"""Computes the first iteration of a row block that sees at most the first half of the kv tile.

Note [Half tiles]
    A row block has half as many queries as a kv tile has keys.  So under a mask with a lower bound, a causal one for
    example, every second tile schedule begins with a kv tile whose second half no query of the row block sees.  Its
    scores are then not computed: half of the products, of the tests of the mask and of the exponentials are left out,
    and P has zeros there.

    This changes no bit of the results.  If the second half was computed, its scores would be -inf, never the maximum of
    a row, and their probabilities exactly zero.  Sums are taken over the whole tile, including the zeros, in the order
    of any other tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from ...shared.device.steps import accumulator_layout
from .steps import begin_scores, masked, probabilities, release, sum_with, wait_for
from .tile_work import ROWS


@gluon.jit
def half_tile_step(work, data, shared, score, here, kv, it, m, total):
    """Computes the first iteration of a row block that sees at most the first half of the kv tile; returns (P, m,
    total).

    P: fp32 [ROWS, BLOCK_KV], zero in the second half; m, total: the running row maximum and row sum, fp32 [ROWS].
    here: see `first_step`.
    """
    b, _head, _block, rows, q_tile, _seed, _first_row = here
    layout: gl.constexpr = accumulator_layout(ROWS, ROWS, 4)
    whole: gl.constexpr = accumulator_layout(ROWS, work.BLOCK_KV, 4)
    zero = gl.zeros([ROWS, ROWS], gl.float32, layout)
    stage = wait_for(shared.k_full, it, shared.STAGES)
    s = begin_scores(shared, q_tile, stage, zero)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(shared.k_empty.index(stage))
    s, far = score.begun(s, True)
    s = masked(work, data, s, None, b, by_row(rows, layout), kv)
    p, m, shrink = probabilities(work, score, s, far, by_row(m, layout), True)
    p = gl.join(p, zero).permute([0, 2, 1]).reshape([ROWS, 2 * ROWS])
    p = gl.convert_layout(p, whole, assert_trivial=True)
    return p, by_row(m, whole), sum_with(score, p, total, by_row(shrink, whole))


@gluon.jit
def by_row(x, LAYOUT: gl.constexpr):
    """Converts a vector with one number per row, [ROWS], to the row layout of a tile whose layout is LAYOUT.

    Tiles of different widths distribute their rows to threads alike, so no data move.
    """
    return gl.convert_layout(x, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
