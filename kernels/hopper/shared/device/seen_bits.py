"""Bits of a dense mask in registers, one word or more for a thread, in the order in which threads hold the scores.

Note [Seen bits] in schedule/table_tile_schedule.py says which bit belongs to which score.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def spread(words, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Returns (words, bits), both int32 [.., 2, 2, ...], with an element for each of COUNT bits of each word.

    words: int32 [..]; FIRST: the number of the first bit; COUNT: a power of two.  An element of `bits` has that bit
    alone, and the last dimension stands for the lowest digit of its number.
    """
    bits = gl.full(words.shape, 1 << FIRST, gl.int32, words.type.layout)
    for i in gl.static_range(COUNT.bit_length() - 1):
        words = gl.join(words, words)
        bits = gl.join(bits, bits << (COUNT >> (i + 1)))
    return words, bits


@gluon.jit
def keep_set(values, words, bits, HIDDEN: gl.constexpr):
    """Returns `values`, float32, where the word of each has its bit, else HIDDEN; in one operation, as `keep_between`.

    bits: constants; HIDDEN: a float32, by its bits, in hexadecimal digits.
    """
    return gl.inline_asm_elementwise(
        _keep_set(HIDDEN), "=f,f,r,r", [values, words, bits], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _keep_set(hidden):
    return f"""{{
        .reg .b32 %seen;
        .reg .pred %keep;
        and.b32 %seen, $2, $3;
        setp.ne.b32 %keep, %seen, 0;
        selp.f32 $0, $1, 0f{hidden}, %keep;
        }}"""
