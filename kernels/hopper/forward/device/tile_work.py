"""The work of a CTA of the forward (`TileWork`): the work list of q tiles, and the kv tiles that each visits."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....common.device.aggregates import aggregate

ROWS = gl.constexpr(64)
"""Query rows of a consumer, the M of a warpgroup's matmul."""


@aggregate
class TileWork:
    """The work list of a forward: the order of its q tiles, and the kv tiles that each of them visits.

    The mask is the band ``lo <= q - kv <= hi``, anchored top left, for the bounds that exist (HAS_LO, HAS_HI). The
    queries of a head are cut into *row blocks* of ROWS; a q tile is CONSUMERS neighbouring row blocks of a head, one
    per consumer warpgroup, which share the kv tiles of BLOCK_KV keys that the producer loads. Every row block visits
    its own kv tiles, from `KV_RANGE`, so that its results do not depend on the others of its tile.

    batch_heads, q_heads: query heads of all batch elements, and of one; group: query heads per kv head; q_len, kv_len:
    queries and keys; head_chunk, last_head_chunk: the heads of a head chunk, and the first head of the last one, see
    below; all are int32 scalars. KV_RANGE, SEEN_ROWS, SEEN_KEYS: the generated functions `dash_kv_range`,
    `dash_seen_rows` and `dash_seen_keys`. EVEN_KV: kv_len is a multiple of BLOCK_KV. HALF_TILES: see Note [Half tiles]
    in `half_tile`.

    The list goes through the head chunks; within a head chunk it goes through the q tiles, and for each of them through
    the heads. If the mask has one bound, q tiles with the longest tile schedules come first. A head chunk has
    `head_chunk` heads, except for the last one, which has all heads from `last_head_chunk` on, a multiple of
    `head_chunk`. FROM_THE_END: the last q tiles come first, see `schedule.table_tile_schedule`.
    """

    batch_heads: gl.tensor
    q_heads: gl.tensor
    group: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    head_chunk: gl.tensor
    last_head_chunk: gl.tensor
    KV_RANGE: gl.constexpr
    SEEN_ROWS: gl.constexpr
    SEEN_KEYS: gl.constexpr
    HAS_LO: gl.constexpr
    HAS_HI: gl.constexpr
    FROM_THE_END: gl.constexpr
    EVEN_KV: gl.constexpr
    BLOCK_KV: gl.constexpr
    CONSUMERS: gl.constexpr
    HALF_TILES: gl.constexpr

    @gluon.jit
    def row_blocks(self):
        """Returns the number of row blocks of a head."""
        return (self.q_len + ROWS - 1) // ROWS

    @gluon.jit
    def q_tiles(self):
        """Returns the number of q tiles of a head."""
        return (self.row_blocks() + self.CONSUMERS - 1) // self.CONSUMERS

    @gluon.jit
    def count(self, q_tiles):
        """Returns the number of tiles in the work list; q_tiles: those of a head."""
        return q_tiles * self.batch_heads

    @gluon.jit
    def tile(self, place, q_tiles):
        """Returns (batch element, query head, index among the head's tiles, first row block) of tile `place` of the
        work list, in which a head has `q_tiles` tiles.

        If the number of a head's row blocks is not a multiple of CONSUMERS, the tile with fewer of them is the one with
        the shortest tile schedule.  With FROM_THE_END that is the last of the list, whose first row block is then
        negative.
        """
        first = gl.minimum(place // (self.head_chunk * q_tiles) * self.head_chunk, self.last_head_chunk)
        within = place - first * q_tiles
        heads = gl.where(first < self.last_head_chunk, self.head_chunk, self.batch_heads - self.last_head_chunk)
        head = first + within % heads
        q_tile = within // heads
        first_block = q_tile * self.CONSUMERS
        if self.FROM_THE_END:
            first_block = self.row_blocks() - (q_tile + 1) * self.CONSUMERS
        return head // self.q_heads, head % self.q_heads, q_tile, first_block

    @gluon.jit
    def kv_tiles(self, first_block):
        """Returns (first, end) of the kv tiles that any row block of a q tile visits; there is at least one.

        first_block: the q tile's first row block.
        """
        lowest = gl.maximum(first_block, 0)
        highest = gl.minimum(first_block + self.CONSUMERS, self.row_blocks()) - 1
        first, _full_first, _full_end, _end = self._kv_range(lowest)
        _first, _full_first, _full_end, end = self._kv_range(highest)
        end = gl.maximum(end, 1)
        return gl.minimum(first, end - 1), end

    @gluon.jit
    def tile_schedule(self, block, tile_first, tile_end):
        """Returns (first, full_first, full_end, end) of the kv tiles that a row block visits.

        The row block sees all of full_first .. full_end - 1; the others need an elementwise mask.  A row block that
        sees no key visits one kv tile, the last one of its q tile, with a mask, and so does one that does not exist,
        unless `leaves_out` says that it visits none.  tile_first, tile_end: the result of `kv_tiles`.
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
        """Returns whether a mask with a lower bound hides all but the first ROWS keys of kv tile `kv` from a row block.

        The last query of the row block sees most: the keys up to ``block * ROWS + ROWS - 1 - lo``.  The comparison is
        written with the first query, because ptxas then orders loops in a way that suits long tile schedules: see
        docs/what-we-know.md.
        """
        return kv * self.BLOCK_KV > block * ROWS - self.lo - 1

    @gluon.jit
    def _facts(self):
        """Returns (q_len, kv_len, lo, hi), the argument `tile_schedule` of the schedule's generated functions."""
        return self.q_len, self.kv_len, self.lo, self.hi

    @gluon.jit
    def _kv_range(self, block):
        return self.KV_RANGE(block, self._facts(), ROWS, self.BLOCK_KV)

    @gluon.jit
    def first_row(self):
        """Returns the index of the first query that sees any key under the band, an int32 scalar.

        The TMA descriptor of Q begins there, so that coordinates of rows are relative to it.
        """
        return _first_of(self.SEEN_ROWS(self._facts(), ROWS, self.BLOCK_KV))

    @gluon.jit
    def first_key(self):
        """Returns the index of the first key that any query sees under the band, an int32 scalar.

        The TMA descriptors of K and V begin there, so that coordinates of keys are relative to it.
        """
        return _first_of(self.SEEN_KEYS(self._facts(), ROWS, self.BLOCK_KV))


@gluon.constexpr_function
def leaves_out(consumers):
    """Returns whether row blocks that do not exist are skipped, given the number of consumers of a CTA.

    With two consumers they occur only with few queries or an odd number of row blocks, and the branch costs 0.3 %.
    """
    return consumers == 3


@gluon.jit
def _first_of(seen):
    """Returns the first of the seen rows or keys; an index past all of them if there are none.

    The descriptor then has one row that must not be read, and every requested row lies before it.
    """
    return gl.where(seen[0] < seen[1], seen[0], 3 << 29)
