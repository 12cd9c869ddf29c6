"""The knowledge of every role of a CTA: the list of tiles and their walks (`Work`), the shared memory (`Shared`)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....common.device.aggregates import aggregate
from .listed import word_slots

ROWS = gl.constexpr(64)
"""Query rows of a consumer, the M of a warpgroup's matmul."""


@aggregate
class Work:
    """The list of tiles, and the walk of each over its kv tiles.

    ``lo <= q - kv <= hi`` is the mask, anchored top left.  The queries of a head are cut into *row blocks* of ROWS; a
    tile is CONSUMERS neighbouring row blocks of a head, one for each consumer, which share the kv tiles that the
    producer brings.  Every row block walks its own kv tiles, which `KV_RANGE` gives, so that its results do not depend
    on the others of its tile.

    The list goes through the heads section by section; within a section by q tile, the longest walk first as far as the
    mask has one bound, and by head.  A section has `section` heads, but all heads from `last_section` on, a multiple of
    `section`, are in one.  FROM_THE_END: the last q tiles come first, see `schedule.table_walk`.  HALVES: see Note
    [Halves] in `half`.
    """

    batch_heads: gl.tensor
    q_heads: gl.tensor
    group: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    section: gl.tensor
    last_section: gl.tensor
    KV_RANGE: gl.constexpr
    SEEN_ROWS: gl.constexpr
    SEEN_KEYS: gl.constexpr
    HAS_LO: gl.constexpr
    HAS_HI: gl.constexpr
    FROM_THE_END: gl.constexpr
    EVEN_KV: gl.constexpr
    BLOCK_KV: gl.constexpr
    CONSUMERS: gl.constexpr
    HALVES: gl.constexpr

    @gluon.jit
    def row_blocks(self):
        """Row blocks of a head."""
        return (self.q_len + ROWS - 1) // ROWS

    @gluon.jit
    def q_tiles(self):
        """Tiles of a head."""
        return (self.row_blocks() + self.CONSUMERS - 1) // self.CONSUMERS

    @gluon.jit
    def count(self):
        """How many tiles the list has."""
        return self.q_tiles() * self.batch_heads

    @gluon.jit
    def tile(self, place):
        """(batch element, query head, place among the tiles of the head, first row block) of a tile of the list.

        Where the row blocks of a head do not divide by CONSUMERS, the tile with fewer of them is the one whose walk is
        the shortest: FROM_THE_END the last of the list, whose first row block is then negative.
        """
        q_tiles = self.q_tiles()
        first = gl.minimum(place // (self.section * q_tiles) * self.section, self.last_section)
        within = place - first * q_tiles
        heads = gl.where(first < self.last_section, self.section, self.batch_heads - self.last_section)
        head = first + within % heads
        q_tile = within // heads
        first_block = q_tile * self.CONSUMERS
        if self.FROM_THE_END:
            first_block = self.row_blocks() - (q_tile + 1) * self.CONSUMERS
        return head // self.q_heads, head % self.q_heads, q_tile, first_block

    @gluon.jit
    def kv_tiles(self, first_block):
        """(first, end) of the kv tiles that one of a tile's row blocks walks; at least one kv tile."""
        lowest = gl.maximum(first_block, 0)
        highest = gl.minimum(first_block + self.CONSUMERS, self.row_blocks()) - 1
        first, _full_first, _full_end, _end = self._kv_range(lowest)
        _first, _full_first, _full_end, end = self._kv_range(highest)
        end = gl.maximum(end, 1)
        return gl.minimum(first, end - 1), end

    @gluon.jit
    def walk(self, block, tile_first, tile_end):
        """(first, full_first, full_end, end): the kv tiles that a row block walks, and those that need no mask there.

        A row block that sees no key walks one kv tile, the last one of its tile, with a mask, and so does one that does
        not exist, unless `leaves_out` says that it walks none.
        """
        inside = gl.minimum(gl.maximum(block, 0), self.row_blocks() - 1)
        first, full_first, full_end, end = self._kv_range(inside)
        absent = inside != block
        nothing = (first >= end) | absent
        first = gl.where(nothing, tile_end - 1, first)
        end = gl.where(nothing, tile_end, end)
        full_first = gl.where(nothing, tile_end, full_first)
        full_end = gl.where(nothing, tile_end, full_end)
        if leaves_out(self.CONSUMERS):
            first = gl.where(absent, tile_first, first)
            end = gl.where(absent, tile_first, end)
        return first, full_first, full_end, end

    @gluon.jit
    def hides_half(self, block, kv):
        """Whether no query of a row block sees more of a kv tile than its first ROWS keys; the mask has a lower bound.

        The last query of the row block sees most: the keys up to ``block * ROWS + ROWS - 1 - lo``.  Written with the
        first query, the comparison is the same, and ptxas puts loops in an order that suits long walks: see
        docs/what-we-know.md.
        """
        return kv * self.BLOCK_KV > block * ROWS - self.lo - 1

    @gluon.jit
    def _facts(self):
        """The tuple `walk` of the schedule's functions."""
        return self.q_len, self.kv_len, self.lo, self.hi

    @gluon.jit
    def _kv_range(self, block):
        return self.KV_RANGE(block, self._facts(), ROWS, self.BLOCK_KV)

    @gluon.jit
    def first_row(self):
        """The first query that sees a key: row 0 of the descriptor of Q."""
        return _first_of(self.SEEN_ROWS(self._facts(), ROWS, self.BLOCK_KV))

    @gluon.jit
    def first_key(self):
        """The first key that a query sees: row 0 of the descriptors of K and V."""
        return _first_of(self.SEEN_KEYS(self._facts(), ROWS, self.BLOCK_KV))


@gluon.constexpr_function
def leaves_out(consumers):
    """Whether row blocks that do not exist are left out.

    Tiles of two have one with few queries or an odd number of row blocks alone, and the branch costs them 0.3 %.
    """
    return consumers == 3


@gluon.jit
def _first_of(seen):
    """The first of the seen rows or keys; where nobody sees anything, a number beyond all of them.

    The descriptor then has a row that nobody may look at, and with this every row that is asked for lies before it.
    """
    return gl.where(seen[0] < seen[1], seen[0], 3 << 29)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@aggregate
class Shared:
    """Shared memory of a CTA: operand tiles, rings and their barriers.

    q: a ring of Q_STAGES, each with a tile per consumer; out: a tile per consumer, in the place of q with OUT_IN_Q; k,
    v: rings of STAGES tiles; q_tail, k_tail: the columns past the first ones, if TAIL_D > 0; facts: a ring of
    `fact_slots`, int32 words about the tile that a q belongs to, see `producer.announce`; words: if LISTED, a ring of
    `word_slots`, see Note [Words] in `listed`.

    `*_full` is completed by the producer's copies, `*_empty` by an arrival of every consumer.  If LISTED, v_full has a
    barrier more, which is the producer's own, see `hopper.clear`.
    """

    q: gl.shared_memory_descriptor
    q_tail: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    k_tail: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    facts: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    Q_STAGES: gl.constexpr
    STAGES: gl.constexpr
    TAIL_D: gl.constexpr
    OUT_IN_Q: gl.constexpr


@gluon.constexpr_function
def facts(consumers):
    """int32 words about a tile: five, and four for each consumer."""
    return 5 + 4 * consumers


@gluon.constexpr_function
def fact_slots(q_stages):
    """Tiles whose facts are kept: one more than there are Q tiles, so that the next tile's are there before its Q.

    When the producer brings the Q of a tile, all consumers have left the Q of the tile q_stages before it, and read its
    facts at the latest then: it may write the facts of the tile after this one in their place.
    """
    return q_stages + 1


@gluon.jit
def _tiles(DTYPE: gl.constexpr, COUNT: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """COUNT tiles in the layout that TMA and the matmuls share."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, WIDTH], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [COUNT, HEIGHT, WIDTH], layout)


@gluon.jit
def _words(COUNT: gl.constexpr):
    """COUNT words of int32."""
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def allocate_shared(DTYPE: gl.constexpr, FORM, LISTED: gl.constexpr):
    """All shared memory of a CTA, barriers initialised."""
    BLOCK_KV: gl.constexpr = FORM.BLOCK_KV
    BLOCK_D: gl.constexpr = FORM.BLOCK_D
    TAIL_D: gl.constexpr = FORM.TAIL_D
    BLOCK_DV: gl.constexpr = FORM.BLOCK_DV
    Q_STAGES: gl.constexpr = FORM.Q_STAGES
    STAGES: gl.constexpr = FORM.STAGES
    CONSUMERS: gl.constexpr = FORM.CONSUMERS
    q = _tiles(DTYPE, Q_STAGES * CONSUMERS, ROWS, BLOCK_D)
    k = _tiles(DTYPE, STAGES, BLOCK_KV, BLOCK_D)
    q_tail = q
    k_tail = k
    if TAIL_D > 0:
        q_tail = _tiles(DTYPE, Q_STAGES * CONSUMERS, ROWS, TAIL_D)
        k_tail = _tiles(DTYPE, STAGES, BLOCK_KV, TAIL_D)
    out = q
    if FORM.OUT_IN_Q:
        gl.static_assert(BLOCK_DV == BLOCK_D)
        gl.static_assert(Q_STAGES == 1)
    else:
        out = _tiles(DTYPE, CONSUMERS, ROWS, BLOCK_DV)
    tile_facts = _words(fact_slots(Q_STAGES) * facts(CONSUMERS))
    words = tile_facts
    if LISTED:
        words = _words(word_slots(STAGES))
    return Shared(
        q=q,
        q_tail=q_tail,
        k=k,
        k_tail=k_tail,
        v=_tiles(DTYPE, STAGES, BLOCK_KV, BLOCK_DV),
        out=out,
        facts=tile_facts,
        words=words,
        q_full=_barriers(Q_STAGES, 1),
        q_empty=_barriers(Q_STAGES, CONSUMERS),
        k_full=_barriers(STAGES, 1),
        k_empty=_barriers(STAGES, CONSUMERS),
        v_full=_barriers(STAGES + (1 if LISTED else 0), 1),
        v_empty=_barriers(STAGES, CONSUMERS),
        Q_STAGES=Q_STAGES,
        STAGES=STAGES,
        TAIL_D=TAIL_D,
        OUT_IN_Q=FORM.OUT_IN_Q,
    )
