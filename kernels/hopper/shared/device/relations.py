"""The forms of relations (`common.relations`) in Gluon: `common.device.relations` has them in plain Triton.

A form of a mask, see `common.relations.Layout`, reads the vectors of queries from number Q_ROWS[INDEX] on and those of
keys from number KV_ROWS[INDEX] on, of tuples of all vectors of a mask, each as it broadcasts to the scores; positions:
of the keys, likewise.  Past the last key every vector of keys has -1, which no form shows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def shows(queries, keys, positions, MASK, INDEX: gl.constexpr):
    """Returns whether queries see keys, per pair."""
    Q_ROW: gl.constexpr = MASK.Q_ROWS[INDEX]
    KV_ROW: gl.constexpr = MASK.KV_ROWS[INDEX]
    FORM: gl.constexpr = MASK.FORMS[INDEX]
    if FORM == "codes":
        return queries[Q_ROW] == keys[KV_ROW]
    elif FORM == "ranks":
        return (queries[Q_ROW] <= keys[KV_ROW]) & (keys[KV_ROW] < queries[Q_ROW + 1])
    else:
        return (queries[Q_ROW] <= positions) & (positions < queries[Q_ROW + 1])


@gluon.jit
def keep_shown(s, queries, keys, positions, MASK, INDEX: gl.constexpr):
    """Returns scores, set to -inf where queries do not see keys."""
    Q_ROW: gl.constexpr = MASK.Q_ROWS[INDEX]
    KV_ROW: gl.constexpr = MASK.KV_ROWS[INDEX]
    FORM: gl.constexpr = MASK.FORMS[INDEX]
    if FORM == "codes":
        return _keep_equal(s, queries[Q_ROW], keys[KV_ROW])
    elif FORM == "ranks":
        return keep_between(s, keys[KV_ROW], queries[Q_ROW], queries[Q_ROW + 1])
    else:
        return keep_between(s, positions, queries[Q_ROW], queries[Q_ROW + 1])


@gluon.jit
def keep_between(s, keys, first, end):
    """s where ``first <= keys < end``, else -inf; as one operation, see `_keep_below` in `forward.device.steps`."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred %keep;
        setp.lt.s32 %keep, $2, $4;
        setp.ge.and.s32 %keep, $2, $3, %keep;
        selp.f32 $0, $1, 0fFF800000, %keep;
        }""",
        "=f,f,r,r,r",
        [s, keys, first, end],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _keep_equal(s, a, b):
    """s where ``a == b``, else -inf; as one operation, see `_keep_below` in `forward.device.steps`."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred %keep;
        setp.eq.s32 %keep, $2, $3;
        selp.f32 $0, $1, 0fFF800000, %keep;
        }""",
        "=f,f,r,r",
        [s, a, b],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
