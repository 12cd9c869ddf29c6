"""A mask that is data: the walk of a kv tile as its tables have it (`TableWalk`), and who sees whom in it (`DataMask`).

`closed_form` has the same for bands alone, under the same names.  A *table* holds the walks of a batch element, or of
some of its heads, where heads differ:

* `visits` [tables, n_kv]: the steps of the walk of a kv tile;
* `words` [tables, n_kv, n_q]: of every walk its words, as `schedule.table_walk.step_word` makes them, in the order of
  its steps; what follows them is never read.

Every role reads the word of a step for itself: the words of a walk lie side by side, so the first level of the cache
has them nearly always.  Whatever else is data is read where it is needed, in the steps whose word asks for the mask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from ...schedule.table_walk import TILE_BITS
from .operations import here
from .work import Work

WORD_BITS = gl.constexpr(TILE_BITS)
"""Bits of the q tile and of the rank in a word; the bit above both asks for the mask."""


@aggregate
class TableWalk:
    """Walks that tables give, and what else the mask reads.

    The table of a head is ``batch * table_b + q_head * table_h``, one further from place `first_mirrored` on.  With
    HAS_CODES, q_codes: int32 [batch, q_len]; kv_codes: int32 [batch, kv_len]; a query sees keys of its own code alone;
    none has -1, and no key has -2.  With HAS_DENSE, dense: bytes [batch, q_heads, q_len, kv_len], strides dense_b,
    dense_h, dense_i and dense_j; 0 hides.
    """

    work: Work
    visits: gl.tensor
    words: gl.tensor
    q_codes: gl.tensor
    kv_codes: gl.tensor
    dense: gl.tensor
    table_b: gl.tensor
    table_h: gl.tensor
    first_mirrored: gl.tensor
    dense_b: gl.tensor
    dense_h: gl.tensor
    dense_i: gl.tensor
    dense_j: gl.tensor
    HAS_LO: gl.constexpr
    HAS_HI: gl.constexpr
    HAS_CODES: gl.constexpr
    HAS_DENSE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, work, visits, words, q_codes, kv_codes, dense, table_b, table_h, first_mirrored,
        dense_b, dense_h, dense_i, dense_j, HAS_LO, HAS_HI, HAS_CODES, HAS_DENSE,
    ):  # fmt: skip
        self.work = work
        self.visits = visits
        self.words = words
        self.q_codes = q_codes
        self.kv_codes = kv_codes
        self.dense = dense
        self.table_b = table_b
        self.table_h = table_h
        self.first_mirrored = first_mirrored
        self.dense_b = dense_b
        self.dense_h = dense_h
        self.dense_i = dense_i
        self.dense_j = dense_j
        self.HAS_LO = gl.constexpr(HAS_LO)
        self.HAS_HI = gl.constexpr(HAS_HI)
        self.HAS_CODES = gl.constexpr(HAS_CODES)
        self.HAS_DENSE = gl.constexpr(HAS_DENSE)

    @gluon.jit
    def steps(self, kv):
        """Steps of the walk of kv tile `kv`; none past the last one."""
        n_kv = (self.work.kv_len + self.work.BLOCK_KV - 1) // self.work.BLOCK_KV
        steps = gl.load(self.visits + self._row(gl.minimum(kv, n_kv - 1)))
        return gl.where(kv < n_kv, steps, 0)

    @gluon.jit
    def word(self, step, kv):
        return gl.load(self.words + (self._row(kv) * self.work.n_q + step))

    @gluon.jit
    def q_tile(self, word):
        return word & ((1 << WORD_BITS) - 1)

    @gluon.jit
    def rank(self, word, kv):
        return (word >> WORD_BITS) & ((1 << WORD_BITS) - 1)

    @gluon.jit
    def mask(self, kv, LAYOUT: gl.constexpr):
        """The mask of scores [BLOCK_KV, q rows] of kv tile `kv`, in any layout."""
        return DataMask(self, kv)

    @gluon.jit
    def _row(self, kv):
        """The place of kv tile `kv` among those of all tables."""
        work = self.work
        n_kv = (work.kv_len + work.BLOCK_KV - 1) // work.BLOCK_KV
        mirrored = gl.where(work.place() >= self.first_mirrored, 1, 0)
        table = work.batch * self.table_b + work.q_head() * self.table_h + mirrored
        return table * n_kv + kv


@aggregate
class DataMask:
    """Which scores of kv tile `kv` count: those that the band, the codes and the dense mask all let through."""

    walk: TableWalk
    kv: gl.tensor

    @gluon.constexpr_function
    def __init__(self, walk, kv):
        self.walk = walk
        self.kv = kv

    @gluon.jit
    def q_tile(self, word):
        return self.walk.q_tile(word)

    @gluon.jit
    def applied(self, p, word, PIECE: gl.constexpr):
        """`p`, the probabilities of a piece of the queries of a step, with zeros where the mask hides."""
        if word >> (2 * WORD_BITS) != 0:
            work = self.walk.work
            columns: gl.constexpr = gl.SliceLayout(0, p.type.layout)
            keys: gl.constexpr = gl.SliceLayout(1, p.type.layout)
            q_rows = self.walk.q_tile(word) * work.BLOCK_Q + PIECE * p.shape[1] + gl.arange(0, p.shape[1], columns)
            rows = here(self.kv) * work.BLOCK_KV + gl.arange(0, work.BLOCK_KV, keys)
            p = gl.where(self._sees(q_rows, rows), p, 0.0)
        return p

    @gluon.jit
    def _sees(self, q_rows, rows):
        """Whether each query sees each key: [keys, queries], false past the lengths."""
        walk = self.walk
        work = walk.work
        batch = here(work.batch)
        columns = gl.expand_dims(q_rows, 0)
        keys = gl.expand_dims(rows, 1)
        if walk.HAS_CODES:  # past the lengths there are two codes that differ from each other and from all others
            q_codes = gl.load(walk.q_codes + (batch * work.q_len + q_rows), mask=q_rows < work.q_len, other=-2)
            kv_codes = gl.load(walk.kv_codes + (batch * work.kv_len + rows), mask=rows < work.kv_len, other=-1)
            keep = gl.expand_dims(q_codes, 0) == gl.expand_dims(kv_codes, 1)
        else:
            keep = (columns < work.q_len) & (keys < work.kv_len)
        if walk.HAS_LO:
            keep = keep & (columns - keys >= work.lo)
        if walk.HAS_HI:
            keep = keep & (columns - keys <= work.hi)
        if walk.HAS_DENSE:
            start = walk.dense + batch.to(gl.int64) * walk.dense_b + here(work.q_head()).to(gl.int64) * walk.dense_h
            place = columns.to(gl.int64) * walk.dense_i + keys.to(gl.int64) * walk.dense_j
            keep = keep & (gl.load(start + place, mask=keep, other=0) != 0)
        return keep
