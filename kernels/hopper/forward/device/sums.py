"""Row sums of P (the softmax's denominators), computed by matmuls with columns of ones.

Note [Sums]
    The sum of a row takes an addition for every probability, as many instructions as the maximum takes.  Where
    instructions limit the forward, at head dims up to 64 and where scores are bounded, the product of P with eight
    columns of ones makes the sums: P lies in registers as the left operand of its product with V anyway, and the tensor
    cores have time.  All eight columns are equal.

    These are sums of P as it is multiplied with V, rounded to 16 bits, so that the weights of the values of a row have
    the sum one as exactly as fp32 allows.  The log-sum-exp is that of rounded probabilities, too: off by 2**-8 at most
    for bf16, 2**-11 for fp16, and by less the more keys share a row.  A backward that reads it makes its probabilities
    too large or too small by that much, a row at a time, and rounds each of them by as much.  A program that reads the
    log-sum-exp gets sums in fp32, see `AttentionSpec.logsumexp`.  So does everyone from Triton 3.9 on, which keeps
    descriptors of all slices of the ones in registers: up to 59 instructions of a step would spill.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ...shared.device.steps import accumulator_layout, left_operand
from .tile_work import ROWS

COLUMNS = gl.constexpr(8)
"""Columns of ones: the fewest of a matmul."""


@gluon.jit
def fill_with_ones(tile):
    """Writes ones to a tile of shared memory, [COLUMNS, keys of a kv tile]; matmuls may read it only after a fence."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    tile.store(gl.full([COLUMNS, tile.shape[1]], 1.0, tile.dtype, layout))


@gluon.jit
def no_sums(score, LAYOUT: gl.constexpr):
    """Returns row sums of zero: fp32 [ROWS] in LAYOUT, or with SUMS_BY_MATMUL [ROWS, COLUMNS], all columns equal."""
    if score.SUMS_BY_MATMUL:
        return gl.zeros([ROWS, COLUMNS], gl.float32, accumulator_layout(ROWS, COLUMNS, 4))
    else:
        return gl.zeros([ROWS], gl.float32, LAYOUT)


@gluon.jit
def begin_sums(score, shared, p, total):
    """Issues the asynchronous matmul that adds the row sums of P to `total`, if matmuls compute them; returns `total`.

    p: P rounded to 16 bits.
    """
    if score.SUMS_BY_MATMUL:
        layout: gl.constexpr = left_operand(total.type.layout)
        p = gl.convert_layout(p, layout, assert_trivial=True)
        total = warpgroup_mma(p, shared.ones.permute((1, 0)), total, is_async=True)
    return total


@gluon.jit
def sums_of(score, total, LAYOUT: gl.constexpr):
    """Returns the row sums of P, fp32 [ROWS] in LAYOUT, from the accumulator `total` of `no_sums` or `begin_sums`."""
    if score.SUMS_BY_MATMUL:
        return gl.convert_layout(gl.max(total, 1), LAYOUT, assert_trivial=True)
    else:
        return total
