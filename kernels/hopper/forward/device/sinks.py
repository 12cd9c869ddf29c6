"""Attention sinks: extra scores without a key, which take part in the softmax of a row and have no value."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .steps import exp2


@gluon.jit
def load_sinks(sinks, b, head, rows, q_len):
    """Loads the sinks of rows of a head, in base 2; sinks: as `arguments.SINKS`."""
    pointers = sinks.ptr + b.to(gl.int64) * sinks.b + head.to(gl.int64) * sinks.h + rows.to(gl.int64) * sinks.row
    return gl.load(pointers, mask=(rows >= 0) & (rows < q_len), other=0.0) * 1.4426950408889634


@gluon.jit
def with_sinks(sink, m, total):
    """(base, sum, factor of the output) of rows with their sinks, which `load_sinks` gave; see Note [Softmax] in steps.

    The larger of base and sink is the new base.  A row without keys, whose sum is zero, has the factor zero.
    """
    larger = gl.maximum(m, sink)
    shrink = exp2(m - larger)
    return larger, gl.fma(total, shrink, exp2(sink - larger)), shrink
