"""Scores of products of query and key in Gluon, for sm_90; `common.score` says what they are.

Note [Shares of the bound]
    Of a bounded score ``softcap * tanh(scale * product / softcap)`` kernels take the tanh, its *share* of the bound,
    and put the bound into the factor that makes scores base 2: ``softcap * log2(e)``.

    Instructions are what limits the forward, so the share is a short polynomial of the products that are *near*, with
    ``|scale * product| < 7/16 * softcap``: odd, of degree 5, wrong by at most 2**-18.7.  The forward needs scores, not
    shares, and has the factor in the coefficients.  The share of others is ``1 - 2 / (1 + exp(2 x))``, wrong by less,
    which takes two special functions.  `begun` scales near products to arguments below two, which in fp32 are the
    numbers whose second highest bit is zero: one instruction tests two more products.  A thread that has other products
    takes a branch that computes both forms, and selects the right one for each product.  So the bits of a score depend
    on the product alone, whichever branch its thread takes.  Everything is one piece of assembly, because ptxas moves
    nothing past a branch: polynomials and exponentials of a tile overlap behind it.

    The result is not strictly monotone where the two forms meet.  The base of a row's softmax is therefore close to its
    largest score in base 2, not exactly that; any base gives the same probabilities.

    Infinite products have shares of 1 and -1, and NaN stays.  A mask writes -inf over products, whose probability must
    be zero, not that of a share of -1.  So where HIDES says that a mask does so, products are first bounded from below
    by the lowest finite number, which has the share of -inf; and -inf then means that a product is hidden.  The
    polynomial of -inf is -inf.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .aggregates import aggregate, group

NEAR = gl.constexpr(("0f3E5FFDF9", "0fBB63A13F", "0f3875B376"))
"""``tanh(7 / 32 * v) / v`` for ``|v| < 2``, a polynomial of ``v * v``, as PTX spells fp32, from its lowest power on:
0.218742266, -0.00347335613 and 5.85796879e-05.  The last one is positive."""

FAR = gl.constexpr("""
    mul.rn.f32 %e, %v, 0f3F2194F4;
    ex2.approx.ftz.f32 %e, %e;
    add.rn.f32 %e, %e, 0f3F800000;
    rcp.approx.ftz.f32 %e, %e;
    fma.rn.f32 %e, %e, 0fC0000000, 0f3F800000;""")
"""The share of any argument %v, in %e; the factor is ``7 / 16 * log2(e)``."""


@aggregate
class Score:
    """How a Gluon kernel computes the scores of a call, see `common.score`.

    factor: multiplies products or, with a softcap, values of tanh, and gives scores in base 2 (`score.factor`); bound:
    the arguments of `score.BOUND`, None without a softcap; BOUNDED: whether there is a softcap; FIXED_BASE: a softmax
    has the base zero, see Note [Softmax] in `hopper.forward.device.steps`; SUMS_BY_MATMUL: see Note [Sums] in
    `hopper.forward.device.sums`.
    """

    factor: gl.tensor
    bound: group
    BOUNDED: gl.constexpr
    FIXED_BASE: gl.constexpr
    SUMS_BY_MATMUL: gl.constexpr

    @gluon.jit
    def begun(self, s, HIDES: gl.constexpr):
        """Returns (arguments, far) of products `s`, for the other methods; call it before a mask hides any of them.

        With a softcap the arguments are ``32 / 7 * scale * product / softcap``, and bit 30 of `far` says whether a
        thread has any that the polynomial does not cover.  Without one both are `s`.  HIDES: whether a mask will set
        some to -inf.
        """
        if self.BOUNDED:
            s, far = _begun(s, self.bound.slope)
            if HIDES:
                s = _finite_below(s)
            return s, far
        else:
            return s, s

    @gluon.jit
    def of_largest(self, s, HIDES: gl.constexpr):
        """Returns the scores in base 2 that belong to `s`, the largest argument of each row (see `begun`).

        HIDES: whether a mask may have set all arguments of a row to -inf; -inf then stays.
        """
        if self.BOUNDED:
            score = _far_share(s) * self.factor
            if HIDES:
                score = gl.where(s == -float("inf"), s, score)
            return score
        else:
            return s * self.factor

    @gluon.jit
    def powers(self, s, far, shift, HIDES: gl.constexpr):
        """Returns ``2 ** (share * factor - shift)``, fp32 in the shape of `s`; only with a softcap (BOUNDED).

        s, far: what `begun` returns, from which the share (``tanh(scale * product / softcap)``) is computed.  shift:
        subtracted in base 2.  HIDES: whether a mask hides elements, which are then -inf in `s` and get the power zero.
        """
        return _powers(s, far, self.factor, shift, HIDES)

    @gluon.jit
    def powers_and_slopes(self, s, far, shift):
        """Returns (the result of `powers`, ``1 - share ** 2``), the second being the derivative of the softcap.

        Only with a softcap, and only if a mask hides none of the arguments.
        """
        return _powers_and_slopes(s, far, self.factor, shift)

    @gluon.jit
    def through(self, p, slope):
        """Returns the factor of dP - delta in the gradient of scaled products: `p * slope`; `p` without softcap.

        slope: the softcap's derivative, from `powers_and_slopes`.
        """
        if self.BOUNDED:
            return p * slope
        else:
            return p


@gluon.constexpr_function
def _of_thread(shape, warps):
    """Elements that a thread has of a tile."""
    return shape[0] * shape[1] // (32 * warps)


@gluon.jit
def _begun(s, slope):
    """(arguments, 32 / 7 of those of tanh; words whose bit 30 says whether any of a thread's is not near)."""
    COUNT: gl.constexpr = _of_thread(s.shape, gl.num_warps())
    return gl.inline_asm_elementwise(
        _begin_text(COUNT), _constraints(COUNT, "=f,=r,f,f"), [s, slope], dtype=(gl.float32, gl.int32), is_pure=True,
        pack=COUNT,
    )  # fmt: skip


@gluon.jit
def _finite_below(s):
    return gl.inline_asm_elementwise(
        "max.NaN.f32 $0, $1, 0fFF7FFFFF;", "=f,f", [s], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _far_share(s):
    """The share of any argument, by the form for those that are not near."""
    return gl.inline_asm_elementwise(
        _far_text(), "=f,f", [s], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _powers(s, far, factor, shift, HIDES: gl.constexpr):
    """2 ** (share * factor - shift) of arguments."""
    COUNT: gl.constexpr = _of_thread(s.shape, gl.num_warps())
    return gl.inline_asm_elementwise(
        _powers_text(COUNT, HIDES), _constraints(COUNT, "=f,f,r,f,f"), [s, far, factor, shift], dtype=gl.float32,
        is_pure=True, pack=COUNT,
    )  # fmt: skip


@gluon.jit
def _powers_and_slopes(s, far, factor, shift):
    """(2 ** (share * factor - shift), 1 - share ** 2) of arguments."""
    COUNT: gl.constexpr = _of_thread(s.shape, gl.num_warps())
    return gl.inline_asm_elementwise(
        _slopes_text(COUNT), _constraints(COUNT, "=f,=f,f,r,f,f"), [s, far, factor, shift],
        dtype=(gl.float32, gl.float32), is_pure=True, pack=COUNT,
    )  # fmt: skip


@gluon.constexpr_function
def _constraints(count, kinds):
    return ",".join(kind for kind in kinds.split(",") for _ in range(count))


@gluon.constexpr_function
def _far_text():
    return "{ .reg .f32 %v, %e; mov.f32 %v, $1;" + FAR.value + " mov.f32 $0, %e; }"


@gluon.constexpr_function
def _begin_text(count):
    """$0 ..: arguments; then words; then products, and the slope."""
    product, slope = 2 * count, 3 * count
    lines = ["{", ".reg .b32 %any, %bits;", "mov.b32 %any, 0;"]
    for i in range(count):
        lines += [f"mul.rn.f32 ${i}, ${product + i}, ${slope};", f"mov.b32 %bits, ${i};", "or.b32 %any, %any, %bits;"]
    lines += [f"mov.b32 ${count + i}, %any;" for i in range(count)]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _powers_text(count, hides):
    """$0 ..: powers; then arguments, words, the factor, and shifts."""
    factor = f"${3 * count}"
    coefficients = f"""
    mul.rn.f32 %c0, {factor}, {NEAR.value[0]};
    mul.rn.f32 %c1, {factor}, {NEAR.value[1]};
    mul.rn.f32 %c2, {factor}, {NEAR.value[2]};"""
    near, far = [], []
    for i in range(count):
        power, v, shift = (f"${part * count + i}" for part in (0, 1, 4))
        polynomial = f"""
    mul.rn.f32 %z, {v}, {v};
    fma.rn.f32 %r, %z, %c2, %c1;
    fma.rn.f32 %r, %r, %z, %c0;
    neg.f32 %e, {shift};
    fma.rn.f32 %score, {v}, %r, %e;"""
        choice = f"""
    mov.f32 %v, {v};{FAR.value}
    neg.f32 %a, {shift};
    fma.rn.f32 %e, %e, {factor}, %a;
    abs.f32 %a, {v};
    setp.lt.f32 %near, %a, 0f40000000;
    selp.f32 %score, %score, %e, %near;"""
        if hides:
            choice += f"""
    setp.eq.f32 %hidden, {v}, 0fFF800000;
    selp.f32 %score, {v}, %score, %hidden;"""
        exponential = f"""
    ex2.approx.ftz.f32 {power}, %score;"""
        near.append(polynomial + exponential)
        far.append(polynomial + choice + exponential)
    return _both_ways(f"${2 * count}", coefficients, near, far)


@gluon.constexpr_function
def _slopes_text(count):
    """$0 ..: powers; then slopes; then arguments, words, the factor, and shifts."""
    c0, c1, c2 = NEAR.value
    factor = f"${4 * count}"
    near, far = [], []
    for i in range(count):
        power, slope, v, shift = (f"${part * count + i}" for part in (0, 1, 2, 5))
        polynomial = f"""
    mul.rn.f32 %z, {v}, {v};
    fma.rn.f32 %r, %z, {c2}, {c1};
    fma.rn.f32 %r, %r, %z, {c0};
    mul.rn.f32 %share, {v}, %r;"""
        choice = f"""
    mov.f32 %v, {v};{FAR.value}
    abs.f32 %a, {v};
    setp.lt.f32 %near, %a, 0f40000000;
    selp.f32 %share, %share, %e, %near;"""
        exponential = f"""
    neg.f32 %e, {shift};
    fma.rn.f32 %e, %share, {factor}, %e;
    ex2.approx.ftz.f32 {power}, %e;
    neg.f32 %e, %share;
    fma.rn.f32 {slope}, %e, %share, 0f3F800000;"""
        near.append(polynomial + exponential)
        far.append(polynomial + choice + exponential)
    return _both_ways(f"${3 * count}", "", near, far)


@gluon.constexpr_function
def _both_ways(word, begin, near, far):
    """The way of near arguments, and that of threads that have others: lines of each, and those that come before."""
    lines = f"""{{
    .reg .pred %far, %near, %hidden;
    .reg .f32 %share, %score, %v, %z, %r, %e, %a, %c0, %c1, %c2;
    .reg .b32 %bit;{begin}
    and.b32 %bit, {word}, 0x40000000;
    setp.ne.b32 %far, %bit, 0;
    @%far bra FAR;"""
    return lines + "".join(near) + "\nbra DONE;\nFAR:" + "".join(far) + "\nDONE:\n}"
