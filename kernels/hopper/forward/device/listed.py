"""Masks that are data: `Data` lists the kv tiles of a tile as words, and says by codes which scores of a kv tile count.

Note [Words]
    A tile of the list has a row of words, one for each kv tile that one of its row blocks sees, from the last kv tile
    to the first: ``kv | k0 << 16 | k1 << 18 | k2 << 20 | unseen << 22``, where k_c says what consumer c does with the
    kv tile (SKIP, PARTIAL or FULL), and `unseen` whether it has keys that no query sees.  A row block that sees no key,
    or that does not exist, has one PARTIAL word.

    Consumers learn the first word of a tile with its facts, and every other one with the kv tile before it: the
    producer puts the word of step ``s + 1`` into shared memory before the K of step s is full (`tell`), and consumers
    read it before they leave the V of step s (`told`).  So a word is there when its step begins, and nobody waits for
    it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .....schedule.table_walk import FORWARD_UNSEEN
from .....upstream.gluon import aggregate
from ...shared.device.operations import given, role_barrier

SKIP, PARTIAL, FULL = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""The uses that a consumer makes of a kv tile: give it back unread; test every score; nothing is hidden."""
UNSEEN = gl.constexpr(FORWARD_UNSEEN)


@gluon.jit
def kv_of(word):
    """The kv tile of a word."""
    return word & 0xFFFF


@gluon.jit
def use_of(word, CONSUMER: gl.constexpr):
    """The use that a consumer makes of the kv tile of a word: SKIP, PARTIAL or FULL."""
    return (word >> (16 + 2 * CONSUMER)) & 3


@gluon.jit
def has_unseen(word):
    """Whether the kv tile of a word has keys that no query sees."""
    return (word & (1 << UNSEEN)) != 0


@aggregate
class Data:
    """The tensors of a mask that is data, see `data.ForwardData`; all of them are None in kernels of bands.

    tables: tables of a batch element, 1 or one for each head.  With HAS_DENSE there are no codes: `seen` reads bits.
    CODES_AHEAD: in which steps codes are asked for before the scores are begun, which takes as long as they do: in none
    (0), in the first of a run (1), or in all (2).
    """

    counts_ptr: gl.tensor | gl.constexpr
    steps_ptr: gl.tensor | gl.constexpr
    tables: gl.tensor | gl.constexpr
    q_codes_ptr: gl.tensor | gl.constexpr
    kv_codes_ptr: gl.tensor | gl.constexpr
    seen_bits_ptr: gl.tensor | gl.constexpr
    keys_seen_ptr: gl.tensor | gl.constexpr
    HAS_CODES: gl.constexpr
    HAS_DENSE: gl.constexpr
    CODES_AHEAD: gl.constexpr
    GIVEN: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, counts_ptr, steps_ptr, tables, q_codes_ptr, kv_codes_ptr, seen_bits_ptr, keys_seen_ptr,
        HAS_CODES, HAS_DENSE, CODES_AHEAD,
    ):  # fmt: skip
        self.counts_ptr = given(counts_ptr)
        self.steps_ptr = given(steps_ptr)
        self.tables = given(tables)
        self.q_codes_ptr = given(q_codes_ptr)
        self.kv_codes_ptr = given(kv_codes_ptr)
        self.seen_bits_ptr = given(seen_bits_ptr)
        self.keys_seen_ptr = given(keys_seen_ptr)
        self.HAS_CODES = gl.constexpr(HAS_CODES)
        self.HAS_DENSE = gl.constexpr(HAS_DENSE)
        self.CODES_AHEAD = gl.constexpr(CODES_AHEAD if HAS_CODES else 0)
        self.GIVEN = gl.constexpr(HAS_CODES or HAS_DENSE)

    @gluon.jit
    def table(self, b, head):
        """The table of a head."""
        return b * self.tables + head % self.tables

    @gluon.jit
    def words_of(self, work, b, head, q_tile):
        """(pointer to the first word, how many there are) of the q_tile-th tile of a head, as the list counts."""
        row = self.table(b, head).to(gl.int64) * work.q_tiles() + q_tile
        kv_tiles = (work.kv_len + work.BLOCK_KV - 1) // work.BLOCK_KV
        return self.steps_ptr + row * kv_tiles, gl.load(self.counts_ptr + row)

    @gluon.jit
    def codes(self, work, like, b, rows, kv):
        """The codes of the queries `rows` and of the keys of kv tile `kv`; like: scores, or what has their layout."""
        columns = gl.arange(0, work.BLOCK_KV, gl.SliceLayout(0, like.type.layout))
        row_exists = (rows >= 0) & (rows < work.q_len)
        q_codes = gl.load(self.q_codes_ptr + b.to(gl.int64) * work.q_len + rows, mask=row_exists, other=0)
        if work.EVEN_KV:  # said so that loads are known to be aligned
            first = (b.to(gl.int64) * (work.kv_len // work.BLOCK_KV) + kv) * work.BLOCK_KV
            kv_codes = gl.load(self.kv_codes_ptr + first + columns)
        else:
            keys = kv * work.BLOCK_KV + columns
            start = self.kv_codes_ptr + b.to(gl.int64) * work.kv_len
            kv_codes = gl.load(start + keys, mask=keys < work.kv_len, other=0)
        return q_codes, kv_codes

    @gluon.jit
    def hide(self, work, s, codes, b, rows, kv):
        """Scores of kv tile `kv`, -inf where codes differ; the band is another's matter.

        codes: as `codes` gives them, or None, if they have not been asked for.
        """
        if codes is None:
            codes = self.codes(work, s, b, rows, kv)
        return _keep_equal(s, gl.expand_dims(codes[0], 1), gl.expand_dims(codes[1], 0))


@gluon.jit
def _keep_equal(s, a, b):
    """s where ``a == b``, else -inf; as one operation, see `steps._keep_below`."""
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


@gluon.constexpr_function
def word_slots(stages):
    """Words that are kept.

    When the producer brings the K of step s it has brought the V of step ``s - 2``, so all consumers have left the V
    of step ``s - 2 - stages``, and read what was told there.
    """
    return stages + 2


@gluon.jit
def tell(shared, it, word):
    """Put down the word of the step after the it-th, before the K of the it-th is begun."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    shared.words.index(it % word_slots(shared.STAGES)).store(gl.full([1], 0, gl.int32, layout) + word)
    role_barrier()


@gluon.jit
def told(shared, it):
    """The word of the step after the it-th, whose K has been waited for and whose V has not been left."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(shared.words.index(it % word_slots(shared.STAGES)).load(layout), 0)
