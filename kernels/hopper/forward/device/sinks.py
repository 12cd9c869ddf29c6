"""Attention sinks: one more score per row, which takes part in its softmax but has no key and no value."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .steps import exp2


@gluon.jit
def load_sinks(sinks, b, head, rows, q_len):
    """Loads the sinks of `rows` of a head, multiplied by log2(e): fp32 [ROWS], 0 for rows that do not exist.

    sinks: the group `arguments.SINKS`.
    """
    pointers = sinks.ptr + b.to(gl.int64) * sinks.b + head.to(gl.int64) * sinks.h + rows.to(gl.int64) * sinks.row
    return gl.load(pointers, mask=(rows >= 0) & (rows < q_len), other=0.0) * 1.4426950408889634


@gluon.jit
def with_sinks(sink, m, total):
    """Returns (row maximum, row sum, factor of the output) of rows after their sinks have been added to the softmax.

    sink: as `load_sinks` returns it; m, total: row maximum (base 2) and row sum before, see Note [Softmax] in `steps`.
    The larger of m and sink is the new maximum.  For a row without keys, whose sum is zero, the factor is zero.
    """
    larger = gl.maximum(m, sink)
    shrink = exp2(m - larger)
    return larger, gl.fma(total, shrink, exp2(sink - larger)), shrink
