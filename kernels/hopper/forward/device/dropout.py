"""Dropout: decides which probabilities of a step are kept, by random bits that depend only on seed and position.

Note [Random bits of dropout] in `kernels/reference/dropout.py` defines the bits.  One Philox block gives 16 bits to
each score of two rows and four columns that the same thread holds, so that every thread computes the bits of its own
elements only.  The 16-bit halves of a word are in the order of P after it has been rounded and packed in pairs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .....model import dropout as definition
from ....common.device.aggregates import aggregate, group
from ...shared.device.dropout import bound_of
from ...shared.device.steps import accumulator_layout
from .tile_work import ROWS

ROUNDS = gl.constexpr(definition.ROUNDS)
FIRST_MULTIPLIER, SECOND_MULTIPLIER = gl.constexpr(0xD2511F53), gl.constexpr(0xCD9E8D57)
FIRST_WEYL, SECOND_WEYL = gl.constexpr(0x9E3779B9), gl.constexpr(0xBB67AE85)


@aggregate
class DropoutBits:
    """Draws the random bits of dropout and zeroes dropped probabilities, a fraction ``threshold / 2**16`` of all.

    See Note [Comparing random bits] in `kernels/reference/dropout.py`.  arguments: the group `arguments.DROPOUT`, None
    without dropout; GIVEN: whether there is dropout.
    """

    arguments: group
    GIVEN: gl.constexpr

    @gluon.jit
    def seed(self):
        """Returns the two words of the Philox key, the lower one first; zeros without dropout."""
        if self.GIVEN:
            seed = gl.load(self.arguments.seed)
            return seed.to(gl.uint32), (seed >> 32).to(gl.uint32)
        else:
            return 0, 0

    @gluon.jit
    def bits(self, seed, b, head, first_row, block, kv, BLOCK_KV: gl.constexpr):
        """Returns the words of random bits for a row block and a kv tile, uint32 [ROWS, BLOCK_KV], in the layout of
        scores; both are counted from padded row `first_row`, where their document begins.

        Two neighbouring keys have the same word: its lower half is the bits of the first, its upper half the bits of
        the second.  seed: as `seed` returns it.
        """
        layout: gl.constexpr = _words_layout(BLOCK_KV)
        rows = first_row // 2 + block * (ROWS // 2) + gl.arange(0, ROWS // 2, gl.SliceLayout(1, layout))
        keys = first_row // 4 + kv * (BLOCK_KV // 4) + gl.arange(0, BLOCK_KV // 4, gl.SliceLayout(0, layout))
        c0 = gl.expand_dims(rows, 1).to(gl.uint32)
        c1 = gl.expand_dims(keys, 0).to(gl.uint32)
        again, _ = self.seed()
        zero = again ^ seed[0]  # which the compiler does not know: what needs it is not moved past the read
        w00, w01, w10, w11 = _philox(c0, c1, head.to(gl.uint32) ^ zero, b.to(gl.uint32), seed)
        # one dimension more for each of the bits 0 of the key, 3 of the key, and 3 of the row, in this order
        of_keys = gl.join(gl.join(w00, w00), gl.join(w01, w01))
        more_keys = gl.join(gl.join(w10, w10), gl.join(w11, w11))
        parts = gl.join(of_keys, more_keys)
        parts = parts.reshape([ROWS // 16, 8, BLOCK_KV // 16, 4, 2, 2, 2]).permute([0, 6, 1, 2, 5, 3, 4])
        scores: gl.constexpr = accumulator_layout(ROWS, BLOCK_KV, 4)
        return gl.convert_layout(parts.reshape([ROWS, BLOCK_KV]), scores, assert_trivial=True)

    @gluon.jit
    def kept(self, p, bits):
        """Returns `p`, P rounded to 16 bits, with zeros where it is dropped; bits: as `bits` returns them."""
        bits = gl.convert_layout(bits, p.type.layout, assert_trivial=True)
        threshold = self.arguments.threshold
        return _keep_from(p, bits, bound_of(threshold), threshold)


@gluon.constexpr_function
def _words_layout(block_kv):
    """The layout of blocks of random bits, [ROWS / 2, block_kv / 4].

    Thread ``4 i + j`` of a warp has the row i of its 8, and the columns ``4 n + j``.
    """
    registers = [[0, 1 << i] for i in range(2, (block_kv // 4).bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [ROWS // 2, block_kv // 4])


@gluon.jit
def _philox(c0, c1, c2, c3, key):
    """Returns the four words of each block; the counters broadcast, so what a row shares is computed once."""
    k0, k1 = key
    for i in gl.static_range(ROUNDS):
        first = c0.to(gl.uint64) * FIRST_MULTIPLIER
        second = c2.to(gl.uint64) * SECOND_MULTIPLIER
        c0 = (second >> 32).to(gl.uint32) ^ (k0 + (i * FIRST_WEYL & 0xFFFFFFFF)) ^ c1
        c1 = second.to(gl.uint32)
        c2 = (first >> 32).to(gl.uint32) ^ (k1 + (i * SECOND_WEYL & 0xFFFFFFFF)) ^ c3
        c3 = first.to(gl.uint32)
    return c0, c1, c2, c3


@gluon.jit
def _keep_from(p, bits, bound, threshold):
    """p, zero where its half of `bits` drops it, two elements at a time.

    As a bfloat16 number it is below the half of `bound`, or where the threshold is above a half, it is not.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred %drops;
        .reg .b32 %below, %turn;
        setp.le.s32 %drops, $6, 32768;
        selp.b32 %turn, 0xFFFFFFFF, 0, %drops;
        set.lt.u32.bf16x2 %below, $2, $4;
        lop3.b32 $0, $1, %below, %turn, 0x60;
        }""",
        "=r,r,r,r,r,r,r,r",
        [p, bits, bound, threshold],
        dtype=p.dtype,
        is_pure=True,
        pack=2,
    )
