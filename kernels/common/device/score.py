"""Scores of products of query and key (scale, softcap, bias) in Triton, and their derivative; see `common.score`.

Its definitions become a part of the text of portable kernels, see `portable.templates`.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Score(NamedTuple):
    """The compile-time constants of scores and probabilities.

    SCALE: the factor of products; SOFTCAP: the bound of scores, 0 for none; HAS_BIAS: something is added to scores;
    ROUNDS: of Philox, 0 without dropout; HAS_GRAD_LSE: the log-sum-exp has a gradient, in a backward; HAS_SINKS: rows
    have attention sinks (a score without a key), in a forward.
    """

    SCALE: float
    SOFTCAP: float
    HAS_BIAS: bool
    ROUNDS: int
    HAS_GRAD_LSE: bool
    HAS_SINKS: bool


@triton.jit
def tanh_of(s, SCORE: tl.constexpr):
    """Returns ``tanh(SCALE * s / SOFTCAP)`` for products `s`."""
    twice = 2.0 * 1.4426950408889634 * SCORE.SCALE / SCORE.SOFTCAP
    return 1.0 - 2.0 / (tl.math.exp2(s * twice) + 1.0)


@triton.jit
def bounded(s, SCORE: tl.constexpr):
    """Returns the natural scores of products `s` with a softcap: ``SOFTCAP * tanh(SCALE * s / SOFTCAP)``."""
    return tanh_of(s, SCORE) * SCORE.SOFTCAP


@triton.jit
def after_slope(s, SIGN: tl.constexpr, SCORE: tl.constexpr):
    """Returns the numbers whose products with the slope are scores in base 2: ``SIGN * s``, or softcapped scores.

    s: products of query and key.  SIGN: 1, -1 or 0; `templates.signed_slope` returns it and the slope.
    """
    if SCORE.SOFTCAP > 0:
        s = bounded(s, SCORE)
    elif SIGN <= 0:
        s = s * SIGN
    return s


@triton.jit
def in_base_2(s, SCORE: tl.constexpr):
    """Returns the scores of products `s` in base 2, that is, times log2(e)."""
    log2e = 1.4426950408889634
    if SCORE.SOFTCAP > 0:
        return bounded(s, SCORE) * log2e
    else:
        return s * (SCORE.SCALE * log2e)


@triton.jit
def biased(s, bias, SCORE: tl.constexpr):
    """Returns the scores in base e of products `s` of query and key, with `bias` added."""
    if SCORE.SOFTCAP > 0:
        return bounded(s, SCORE) + bias
    else:
        return tl.math.fma(s, SCORE.SCALE, bias)


@triton.jit
def through_bound(ds, s, operand, SCORE: tl.constexpr):
    """Backpropagates `ds` through the softcap: from the gradient of the scores to that of ``SCALE * s``.

    Without a softcap, returns `ds`.  s: the unscaled products; operand: the operand by which the result will be
    multiplied, see `rounded_product`.
    """
    if SCORE.SOFTCAP > 0:
        share = tanh_of(s, SCORE)
        return rounded_product(ds, tl.math.fma(-share, share, 1.0), operand)
    else:
        return ds


@triton.jit
def rounded_product(x, y, operand):
    """Returns x * y; if it enters an fp32 matmul with `operand`, it is rounded before anything is added to it.

    An fp32 matmul consists of three tf32 matmuls, for which the tf32 part of an operand is subtracted from it.  The
    compiler would fuse this subtraction with the product x * y, unless something stands between the two, such as the
    select of a mask.  The bits of a visible pair would then depend on whether other pairs of the tile are visible.
    """
    if operand.dtype == tl.float32:
        return tl.math.fma(x, y, 0.0)
    else:
        return x * y
