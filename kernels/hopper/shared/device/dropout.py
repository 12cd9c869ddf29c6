"""Dropout in the consumers of the backward: the sign of P says which probabilities are dropped.

`DropoutSigns` draws the bits that Note [Random bits of dropout] in `kernels/reference/dropout.py` defines, and
`NoDropout` replaces it in calls without dropout.

Note [Signs of probabilities]
    A step needs to know twice what was dropped: where it rounds P, and, a matmul later, where it computes dS.  Until
    then 32 flags per thread would take registers that are not available.  A probability is not negative, so its sign
    says it: P is negative where it was dropped.  Rounding with a floor of zero, which is one instruction as rounding
    alone is, turns signed P into the left operand of dV.

dV is multiplied by the factor of kept probabilities when a tile schedule is over, and dP where delta is subtracted from
it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .....model import dropout as definition
from ....common.device.aggregates import aggregate, replace
from .head_work import HeadWork
from .operations import here, rounded_from_zero

ROUNDS = gl.constexpr(definition.ROUNDS)


@aggregate
class NoDropout:
    """The stand-in for `DropoutSigns` in calls without dropout; its methods compute the same, but drop nothing."""

    GIVEN: gl.constexpr = False

    @gluon.jit
    def at(self, work):
        return self

    @gluon.jit
    def marked(self, p, q_tile, kv, PIECE: gl.constexpr):
        return p

    @gluon.jit
    def rounded(self, p, DTYPE: gl.constexpr):
        return p.to(DTYPE)

    @gluon.jit
    def gradient(self, p, dp, delta):
        return p * (dp - delta)

    @gluon.jit
    def rescaled(self, dv):
        return dv


@aggregate
class DropoutSigns:
    """Draws the random bits of dropout, and keeps in the signs of P which probabilities are dropped.

    A fraction ``threshold / 2**16`` is dropped, and the others are multiplied by `rescale`.  arguments: the group
    `arguments.dropout`, seed, threshold and rescale.
    """

    work: HeadWork
    arguments: gl.tuple
    GIVEN: gl.constexpr = True

    @gluon.jit
    def at(self, work):
        """Returns a copy of this object for the query head of `work`, a `HeadWork`."""
        return replace(self, work=work)

    @gluon.jit
    def marked(self, p, q_tile, kv, PIECE: gl.constexpr):
        """Returns the probabilities `p`, [keys, queries], of a piece of a tile pair, negated where dropped."""
        work = self.work
        QUERIES: gl.constexpr = p.shape[1] // 2
        layout: gl.constexpr = block_layout(p.shape, gl.num_warps())
        seed = gl.load(self.arguments.seed)  # in every step: the keys of all rounds must not stay in registers
        queries = q_tile * (work.BLOCK_Q // 2) + PIECE * QUERIES + gl.arange(0, QUERIES, gl.SliceLayout(0, layout))
        keys = here(kv) * (work.BLOCK_KV // 4) + gl.arange(0, work.BLOCK_KV // 4, gl.SliceLayout(1, layout))
        head, batch = here(work.q_head()), here(work.batch)
        words = philox(seed, gl.expand_dims(queries, 0), gl.expand_dims(keys, 1), head, batch)
        bits = gl.convert_layout(in_place(words, p.shape), p.type.layout)
        threshold = self.arguments.threshold
        return negative_where_dropped(p, bits, bound_of(threshold), threshold)

    @gluon.jit
    def rounded(self, p, DTYPE: gl.constexpr):
        """Returns signed P rounded to DTYPE, with zeros where it is negative, that is, dropped."""
        return rounded_from_zero(p, DTYPE)

    @gluon.jit
    def gradient(self, p, dp, delta):
        """Returns dS = P (dP - delta) from signed P; the rescaled dP counts as zero where P was dropped."""
        return p * gl.where(p >= 0, dp * self.arguments.rescale - delta, delta)

    @gluon.jit
    def rescaled(self, dv):
        return dv * self.arguments.rescale


@gluon.constexpr_function
def block_layout(shape, warps):
    """Returns the register layout of blocks of random bits, [keys / 4, queries / 2], for scores [keys, queries].

    A block has the bits of 4 keys and 2 queries.  Every thread computes as few blocks as possible.  A thread holds the
    scores of two keys of the same parity, eight apart.  Its neighbour with the other parity needs the other halves of
    the same blocks: each of the two computes the blocks of queries of its own parity.

    shape: (keys, queries).  warps: the number of warps that share the scores.
    """
    keys, queries = shape
    along_keys = min(warps, keys // 16)
    own = queries // (warps // along_keys)
    registers = [[0, 8 << i] for i in range((own // 16).bit_length() - 1)]
    of_warps = [[4 << i, 0] for i in range(along_keys.bit_length() - 1)]
    of_warps += [[0, own // 2 << i] for i in range((warps // along_keys).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [0, 1], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [keys // 4, queries // 2])


@gluon.jit
def philox(seed, queries, keys, head, batch):
    """Returns the four uint32 words that Philox generates for each block of two queries and four keys, [key blocks,
    query blocks].

    queries, keys: the indices of the blocks, [1, query blocks] and [key blocks, 1].
    """
    k0 = seed.to(gl.uint32)
    k1 = (seed >> 32).to(gl.uint32)
    c0 = queries.to(gl.uint32)
    c1 = keys.to(gl.uint32)
    c2 = head.to(gl.uint32)
    c3 = batch.to(gl.uint32)
    for _ in gl.static_range(ROUNDS):
        first = c0.to(gl.uint64) * 0xD2511F53
        second = c2.to(gl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(gl.uint32) ^ c1 ^ k0
        c2 = (first >> 32).to(gl.uint32) ^ c3 ^ k1
        c1 = second.to(gl.uint32)
        c3 = first.to(gl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@gluon.jit
def bound_of(threshold):
    """Returns the 16-bit bound of random bits in both halves of a uint32; see Note [Comparing random bits]."""
    count = gl.minimum(threshold, 65536 - threshold)
    return gl.where(count <= 0x7F80, 0xFF80 - count, count - 0x7F81).to(gl.uint32) * 0x10001


@gluon.jit
def negative_where_dropped(p, bits, bound, threshold):
    """Returns `p`, fp32 and not negative, with its sign changed where random bits drop it, two elements at a time.

    bits: 16 random bits of each element.  Bits below `bound` drop it, or, if the threshold is above a half, bits that
    are not below.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred %keeps, %first, %second;
        setp.gt.s32 %keeps, $7, 32768;
        setp.lt.xor.bf16x2 %first|%second, $4, $5, %keeps;
        mov.b32 $0, $2;
        mov.b32 $1, $3;
        @%first neg.f32 $0, $2;
        @%second neg.f32 $1, $3;
        }""",
        "=f,=f,f,f,r,r,r,r,r",
        [p, bits, bound, threshold],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def in_place(words, SHAPE: gl.constexpr):
    """Returns the 16 random bits of every score, [keys, queries] of SHAPE, from the four words of each block."""
    w00, w01, w10, w11 = words  # by bit 3 of the query, then of the key
    # one dimension more for each of the bits 0 of the key, 3 of the key, and 3 of the query, in this order
    of_first = gl.join(halves(w00), halves(w01))
    of_second = gl.join(halves(w10), halves(w11))
    parts = gl.join(of_first, of_second)
    parts = parts.reshape([SHAPE[0] // 16, 4, SHAPE[1] // 16, 8, 2, 2, 2])
    return parts.permute([0, 5, 1, 4, 2, 6, 3]).reshape(SHAPE)


@gluon.jit
def halves(words):
    return gl.join(words.to(gl.uint16), (words >> 16).to(gl.uint16))
