"""A band in closed form: the walk of a kv tile (`ClosedForm`), and who sees whom in it (`BandMask`).

`table_walk` has the same for masks that are data.  The roles ask either, and know a step by its *word* alone, one
number that says which q tile is visited and, together with the kv tile, whatever else there is to know.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from .work import Work


@aggregate
class ClosedForm:
    """Walks that the schedule's generated functions give.  The word of a step is its q tile.

    Not CLEARS: rows that take no part are outside of the descriptors.
    """

    work: Work
    VISITS: gl.constexpr
    Q_TILE: gl.constexpr
    RANK: gl.constexpr
    Q_RANGE: gl.constexpr
    HAS_LO: gl.constexpr
    HAS_HI: gl.constexpr
    EVEN_KV: gl.constexpr
    CLEARS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, work, VISITS, Q_TILE, RANK, Q_RANGE, HAS_LO, HAS_HI, EVEN_KV):
        self.work = work
        self.VISITS = gl.constexpr(VISITS)
        self.Q_TILE = gl.constexpr(Q_TILE)
        self.RANK = gl.constexpr(RANK)
        self.Q_RANGE = gl.constexpr(Q_RANGE)
        self.HAS_LO = gl.constexpr(HAS_LO)
        self.HAS_HI = gl.constexpr(HAS_HI)
        self.EVEN_KV = gl.constexpr(EVEN_KV)
        self.CLEARS = gl.constexpr(False)

    @gluon.jit
    def at(self, position):
        """The walks of the head at `position`."""
        work = self.work.at(position)
        return ClosedForm(
            work, self.VISITS, self.Q_TILE, self.RANK, self.Q_RANGE, self.HAS_LO, self.HAS_HI, self.EVEN_KV
        )

    @gluon.jit
    def steps(self, kv):
        """Steps of the walk of kv tile `kv`."""
        work = self.work
        steps = self.VISITS(work.place(), kv, work.facts(), work.BLOCK_Q, work.BLOCK_KV)
        return gl.where(kv * work.BLOCK_KV < work.kv_len, steps, 0)

    @gluon.jit
    def word(self, step, kv):
        work = self.work
        return self.Q_TILE(work.place(), kv, step, work.facts(), work.BLOCK_Q, work.BLOCK_KV)

    @gluon.jit
    def q_tile(self, word):
        return word

    @gluon.jit
    def rank(self, word, kv):
        work = self.work
        return self.RANK(work.place(), word, kv, work.facts(), work.BLOCK_Q, work.BLOCK_KV)

    @gluon.jit
    def begin(self, step, kv):
        """What `following` wants for the first step of a role, which is `step`."""
        return 0

    @gluon.jit
    def following(self, ahead, step, after, steps, kv):
        """(word of a step, what `following` wants for the role's next one, which is `after`)."""
        return self.word(step, kv), ahead

    @gluon.jit
    def tell(self, word, slot, full):
        """Nothing: the consumers know the word of a step."""

    @gluon.jit
    def expected(self, step, kv):
        """What a consumer gives to `told` of the mask."""
        return self.word(step, kv)

    @gluon.jit
    def mask(self, kv, LAYOUT: gl.constexpr):
        """The mask of scores [BLOCK_KV, q rows] of kv tile `kv` in LAYOUT."""
        work = self.work
        _first, full_first, full_end, _end = self.Q_RANGE(kv, work.facts(), work.BLOCK_Q, work.BLOCK_KV)
        rows = kv * work.BLOCK_KV + gl.arange(0, work.BLOCK_KV, gl.SliceLayout(1, LAYOUT))
        return BandMask(work, kv, rows, full_first, full_end, self.HAS_LO, self.HAS_HI, self.EVEN_KV)


@aggregate
class BandMask:
    """Which scores of a kv tile count: ``lo <= q - kv <= hi`` and ``kv < kv_len``.

    rows: the keys of the kv-th tile; q tiles first .. end-1 need no mask.
    """

    work: Work
    kv: gl.tensor
    rows: gl.tensor
    first: gl.tensor
    end: gl.tensor
    HAS_LO: gl.constexpr
    HAS_HI: gl.constexpr
    EVEN_KV: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, work, kv, rows, first, end, HAS_LO, HAS_HI, EVEN_KV):
        self.work = work
        self.kv = kv
        self.rows = rows
        self.first = first
        self.end = end
        self.HAS_LO = gl.constexpr(HAS_LO)
        self.HAS_HI = gl.constexpr(HAS_HI)
        self.EVEN_KV = gl.constexpr(EVEN_KV)

    @gluon.jit
    def q_tile(self, word):
        return word

    @gluon.jit
    def told(self, word, slot):
        """The word of a step whose dO is in this slot of its ring."""
        return word

    @gluon.jit
    def applied(self, p, q_tile, slot, PIECE: gl.constexpr):
        """`p`, the probabilities of a piece of the queries of a step, with zeros where the mask hides."""
        if self.HAS_LO or self.HAS_HI or not self.EVEN_KV:
            if (q_tile < self.first) | (q_tile >= self.end):
                columns: gl.constexpr = gl.SliceLayout(0, p.type.layout)
                q_row = q_tile * self.work.BLOCK_Q + PIECE * p.shape[1]
                q_rows = gl.expand_dims(q_row + gl.arange(0, p.shape[1], columns), 0)
                rows = gl.expand_dims(self.rows, 1)
                keep = (rows < self.work.kv_len) & (q_rows >= 0)
                if self.HAS_LO:
                    keep = keep & (q_rows - rows >= self.work.lo)
                if self.HAS_HI:
                    keep = keep & (q_rows - rows <= self.work.hi)
                p = gl.where(keep, p, 0.0)
        return p
