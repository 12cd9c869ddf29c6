"""Scores of products of query and key in Triton, and their derivative; `common.score` says what they are.

Its definitions become a part of the text of portable kernels, see `portable.templates`.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Score(NamedTuple):
    """How scores and probabilities are made.

    SOFTCAP: the bound of scores, 0 for none; ROUNDS: of Philox, 0 without dropout; HAS_GRAD_LSE: the log-sum-exp has a
    gradient, in a backward; HAS_SINKS: there are scores of no key, in a forward.
    """

    SCALE: float
    SOFTCAP: float
    HAS_BIAS: bool
    ROUNDS: int
    HAS_GRAD_LSE: bool
    HAS_SINKS: bool


@triton.jit
def tanh_of(s, SCORE: tl.constexpr):
    """The share of the bound that the scores of products have, from -1 to 1."""
    twice = 2.0 * 1.4426950408889634 * SCORE.SCALE / SCORE.SOFTCAP
    return 1.0 - 2.0 / (tl.math.exp2(s * twice) + 1.0)


@triton.jit
def bounded(s, SCORE: tl.constexpr):
    """The bounded scores of products, natural."""
    return tanh_of(s, SCORE) * SCORE.SOFTCAP


@triton.jit
def after_slope(s, SIGN: tl.constexpr, SCORE: tl.constexpr):
    """The numbers whose products with the slope of `templates.signed_slope` are the scores, in base 2."""
    if SCORE.SOFTCAP > 0:
        s = bounded(s, SCORE)
    elif SIGN <= 0:
        s = s * SIGN
    return s


@triton.jit
def in_base_2(s, SCORE: tl.constexpr):
    """The scores of products in base 2."""
    log2e = 1.4426950408889634
    if SCORE.SOFTCAP > 0:
        return bounded(s, SCORE) * log2e
    else:
        return s * (SCORE.SCALE * log2e)


@triton.jit
def biased(s, bias, SCORE: tl.constexpr):
    """The scores of products, natural, with a bias."""
    if SCORE.SOFTCAP > 0:
        return bounded(s, SCORE) + bias
    else:
        return tl.math.fma(s, SCORE.SCALE, bias)


@triton.jit
def through_bound(ds, s, operand, SCORE: tl.constexpr):
    """The gradient of scaled scores from the gradient `ds` of bounded ones; operand: as of `rounded_product`."""
    if SCORE.SOFTCAP > 0:
        share = tanh_of(s, SCORE)
        return rounded_product(ds, tl.math.fma(-share, share, 1.0), operand)
    else:
        return ds


@triton.jit
def rounded_product(x, y, operand):
    """x * y, which is rounded before anything is added to it, if it becomes an operand of a matmul beside `operand`.

    A matmul of fp32 is made of three of tf32: it subtracts from an operand what tf32 holds of it.  The compiler would
    fuse that with a multiplication where nothing is between the two, such as the choice that a mask makes: then the
    bits of a pair that is seen would depend on whether other pairs of the tile are.
    """
    if operand.dtype == tl.float32:
        return tl.math.fma(x, y, 0.0)
    else:
        return x * y
