"""A mask that is data: the tile schedule of a kv tile, from tables (`TableTileSchedule`), and its elementwise mask
(`TableMask`).

`closed_form` defines the same functions for bands alone.  A *table* holds the tile schedules of a batch element, or of
one of its heads, where heads differ:

* `visits` [tables, n_kv]: the number of steps of each kv tile;
* `packed_tiles` [tables, n_kv, n_q]: of every tile schedule its packed tile ids, as
  `schedule.table_tile_schedule.packed_tile` makes them, in the order of its steps; what follows them is never read.

Vectors of the queries go to shared memory beside the packed tile ids of Note [Packed tiles of steps] in `packed_tiles`,
by asynchronous copies that arrive with the dO; consumers keep the vectors of their keys in registers.  Producer and
reducers load every packed tile id a step of theirs before they need it.  Bits of a dense mask (`seen`), and vectors of
queries that have no room in shared memory, are read where they are needed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from .....schedule.table_tile_schedule import TILE_BITS
from ....common.device.aggregates import aggregate, replace
from ....common.device.relations.form import read_by
from ...shared.device.clear import unseen_keys
from ...shared.device.head_work import HeadWork
from ...shared.device.operations import begin_copy, here
from ...shared.device.packed_tiles import MASKED, allocate_int32, put_int32, read_int32, within_band
from ...shared.device.shared_memory import pieces
from .seen import ask_seen, keep_seen

PACKED_TILE_BITS = gl.constexpr(TILE_BITS)
"""Bits of the q tile and of the rank in a packed tile id; the bit above both is `MASKED`, and the sign asks for
`clear`.
"""


@aggregate
class TableTileSchedule:
    """The tile schedules of a head, read from tables, and the other tensors that the mask reads.

    data: the group `arguments.DATA`.  The table of a head is ``batch * table_b + q_head * table_h``.  q_vectors: int32
    [elements, QUERIES, q_len]; kv_vectors: int32 [elements, KEYS, kv_len]; both are read by the mask's relations, see
    `element`.  keys_seen: bytes [tables, kv_len]; 0 for keys that no query sees.  With HAS_DENSE, seen_bits: int32
    [tables, n_kv, n_q, words, threads], see Note [Seen bits] in schedule/table_tile_schedule.py, in place of vectors.

    In shared memory, for the steps whose dO is there: packed_tiles, a ring of packed tile ids; step_vectors, a ring of
    the first MASK.SHARED vectors of their queries, in pieces as dO, with the vectors of a piece one after the other.
    MASK: see `arguments.MaskKind`.  SPLITS_LOOPS is false, because the mask may cut any step.  CLEARS: the producer
    zeroes rows that take no part.
    """

    work: HeadWork
    data: gl.tuple
    packed_tiles: gl.shared_memory_descriptor
    step_vectors: gl.shared_memory_descriptor
    MASK: gl.tuple
    SPLITS_LOOPS: gl.constexpr = False
    CLEARS: gl.constexpr = True

    @gluon.jit
    def at(self, position):
        """Returns a copy of these tile schedules for the head at `position` of the launch order."""
        return replace(self, work=self.work.at(position))

    @gluon.jit
    def steps(self, kv):
        """Returns the number of iterations (visited q tiles) of kv tile `kv`; 0 past the last kv tile."""
        steps = gl.load(self.data.visits + self.row(self._existing(kv)))
        return gl.where(kv * self.work.BLOCK_KV < self.work.kv_len, steps, 0)

    @gluon.jit
    def packed_tile(self, step, kv):
        return gl.load(self.data.packed_tiles + (self.row(kv) * self.work.n_q + step))

    @gluon.jit
    def q_tile(self, packed_tile):
        return packed_tile & ((1 << PACKED_TILE_BITS) - 1)

    @gluon.jit
    def rank(self, packed_tile, kv):
        return (packed_tile >> PACKED_TILE_BITS) & ((1 << PACKED_TILE_BITS) - 1)

    @gluon.jit
    def begin(self, step, kv):
        """Returns the packed tile id (q tile, rank, and whether the mask cuts the tile) of iteration `step` of kv tile
        `kv`.

        A role calls this for its first iteration, and `following` for the others; if it has none, the result is
        undefined.  The load is volatile: the compiler would delay another load until the number of iterations, also
        loaded, is there.
        """
        n_q = self.work.n_q
        return gl.load(
            self.data.packed_tiles + (self.row(self._existing(kv)) * n_q + gl.minimum(step, n_q - 1)), volatile=True
        )

    @gluon.jit
    def following(self, ahead, step, after, steps, kv):
        """Returns (packed tile id of iteration `step`, packed tile id of iteration `after`).

        ahead: the packed tile id of `step`, from `begin` or the previous call; after: the role's next iteration; steps:
        the number of iterations.
        """
        return ahead, self.packed_tile(gl.minimum(after, steps - 1), kv)

    @gluon.jit
    def hidden_keys(self, kv):
        """Returns int32 [BLOCK_KV]: 1 for keys of kv tile `kv` that no query sees; called by the producer."""
        work = self.work
        return unseen_keys(self.data.keys_seen, self._table(), self._existing(kv), work.kv_len, work.BLOCK_KV)

    @gluon.jit
    def has_blind(self, packed_tile):
        """Returns whether some query of the step's q tile sees no key at all: the sign bit of `packed_tile`."""
        return packed_tile < 0

    @gluon.jit
    def put_packed_tile(self, packed_tile, stage, full):
        """Passes the packed tile id and the query vectors of an iteration to the consumers; called by the producer.

        full: the dO barrier of this stage, at which the copies of the vectors arrive; it must not have been armed yet.
        """
        work = self.work
        QUERIES: gl.constexpr = self.MASK.QUERIES
        if QUERIES > 0:
            ROWS: gl.constexpr = self.step_vectors.shape[1]
            PIECES: gl.constexpr = work.BLOCK_Q // ROWS
            rows = self.q_tile(packed_tile) * work.BLOCK_Q + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
            for piece in gl.static_range(PIECES):
                positions = gl.minimum(rows + piece * ROWS, work.q_len - 1)  # past the end P is zero whatever they have
                vectors = self.data.q_vectors + (QUERIES * self.element() * work.q_len + positions)
                for i in gl.static_range(self.MASK.SHARED):
                    own = self.step_vectors.index(self.MASK.SHARED * (stage * PIECES + piece) + i)
                    begin_copy(own, vectors + i * work.q_len)
            async_copy.mbarrier_arrive(full)
        put_int32(self.packed_tiles, stage, packed_tile)

    @gluon.jit
    def mask(self, kv, LAYOUT: gl.constexpr):
        """Returns the elementwise mask of kv tile `kv`, a `TableMask`, for scores [BLOCK_KV, q rows] in LAYOUT."""
        work = self.work
        keys = kv * work.BLOCK_KV + gl.arange(0, work.BLOCK_KV, gl.SliceLayout(1, LAYOUT))
        of_keys = ()
        for i in gl.static_range(self.MASK.KEYS):  # past the end there is what no query sees
            vector = gl.load(
                self.data.kv_vectors + ((self.MASK.KEYS * self.element() + i) * work.kv_len + keys),
                mask=keys < work.kv_len, other=-1,
            )  # fmt: skip
            of_keys = of_keys + (vector,)
        return TableMask(self, kv, of_keys, LAYOUT)

    @gluon.jit
    def _existing(self, kv):
        """Returns `kv`, clamped to the last kv tile."""
        return gl.minimum(kv, (self.work.kv_len + self.work.BLOCK_KV - 1) // self.work.BLOCK_KV - 1)

    @gluon.jit
    def row(self, kv):
        """Returns the index of kv tile `kv` among the kv tiles of all tables."""
        n_kv = (self.work.kv_len + self.work.BLOCK_KV - 1) // self.work.BLOCK_KV
        return self._table() * n_kv + kv

    @gluon.jit
    def _table(self):
        return self.work.batch * self.data.table_b + self.work.q_head() * self.data.table_h

    @gluon.jit
    def element(self):
        """Returns the index of the head's vectors: its table, or its batch element where heads share the vectors."""
        if self.MASK.BY_HEAD:
            return self._table()
        else:
            return self.work.batch


@aggregate
class TableMask:
    """Tests which pairs in kv tile `kv` the mask shows, element by element: by band and relations, or by bits.

    of_keys: the mask's vectors of the tile's keys, each int32 [BLOCK_KV], in registers.  LAYOUT: that of scores.
    """

    tile_schedule: TableTileSchedule
    kv: gl.tensor
    of_keys: gl.tuple
    LAYOUT: gl.constexpr

    @gluon.jit
    def q_tile(self, packed_tile):
        return self.tile_schedule.q_tile(packed_tile)

    @gluon.jit
    def read_packed_tile(self, stage):
        """Reads the packed tile id (q tile, and whether the mask cuts it) of the iteration whose dO is in stage `stage`
        of its ring.
        """
        return read_int32(self.tile_schedule.packed_tiles, stage)

    @gluon.jit
    def ask(self, packed_tile, PIECE: gl.constexpr):
        """Loads what `applied` reads, ahead of its use: with MASK.AHEAD, the words of bits of the piece."""
        if self.tile_schedule.MASK.HAS_DENSE and self.tile_schedule.MASK.AHEAD:
            return self._words(packed_tile, PIECE)
        else:
            return packed_tile

    @gluon.jit
    def _words(self, packed_tile, PIECE: gl.constexpr):
        """Loads the words of bits of a piece, int32 [threads], zeros where the mask does not cut the tile."""
        schedule = self.tile_schedule
        work = schedule.work
        pair = schedule.row(here(self.kv)) * work.n_q + schedule.q_tile(packed_tile)
        cut = packed_tile >> MASKED != 0
        return ask_seen(schedule.data.seen_bits, pair, cut, work.BLOCK_KV * work.BLOCK_Q, PIECE, self.LAYOUT)

    @gluon.jit
    def applied(self, p, asked, packed_tile, stage, PIECE: gl.constexpr, CUT: gl.constexpr):
        """Returns `p`, the probabilities [keys, queries] of a piece of an iteration's q tile, with zeros where the mask
        hides the key.

        asked: the result of `ask`; PIECE: the index of the piece; CUT: None, because only the packed tile id says
        whether the mask cuts the tile.
        """
        gl.static_assert(CUT is None)
        if packed_tile >> MASKED != 0:
            if self.tile_schedule.MASK.HAS_DENSE and self.tile_schedule.MASK.AHEAD:
                p = keep_seen(p, asked, PIECE)
            elif self.tile_schedule.MASK.HAS_DENSE:
                p = keep_seen(p, self._words(packed_tile, PIECE), PIECE)
            else:
                p = self._of_vectors(p, packed_tile, stage, PIECE)
        return p

    @gluon.jit
    def _of_vectors(self, p, packed_tile, stage, PIECE: gl.constexpr):
        work = self.tile_schedule.work
        columns: gl.constexpr = gl.SliceLayout(0, p.type.layout)
        keys: gl.constexpr = gl.SliceLayout(1, p.type.layout)
        q_row = self.tile_schedule.q_tile(packed_tile) * work.BLOCK_Q + PIECE * p.shape[1]
        queries = gl.arange(0, p.shape[1], columns)
        rows = here(self.kv) * work.BLOCK_KV + gl.arange(0, work.BLOCK_KV, keys)
        piece = stage * (work.BLOCK_Q // p.shape[1]) + PIECE
        return gl.where(self._sees(q_row, queries, rows, piece), p, 0.0)

    @gluon.jit
    def _vector(self, INDEX: gl.constexpr, q_row, columns):
        """Loads a vector of the queries of a piece from global memory, int32 [queries]; see `_sees`."""
        work = self.tile_schedule.work
        queries = q_row + columns
        row = self.tile_schedule.MASK.QUERIES * here(self.tile_schedule.element()) + INDEX
        return gl.load(
            self.tile_schedule.data.q_vectors + (row * work.q_len + queries),
            mask=queries < work.q_len, other=0,
        )  # fmt: skip

    @gluon.jit
    def _sees(self, q_row, columns, rows, piece):
        """Returns whether band and relations let each query of a piece see each key: [keys, queries].

        It is false for keys past the last, and undefined for queries past the last, whose P is zero.  q_row: the first
        query; piece: its index in the ring.
        """
        tile_schedule = self.tile_schedule
        work = tile_schedule.work
        keys = gl.expand_dims(rows, 1)
        QUERIES: gl.constexpr = tile_schedule.MASK.QUERIES
        of_queries, of_keys = (), ()
        for i in gl.static_range(QUERIES):
            if i < tile_schedule.MASK.SHARED:
                vector = tile_schedule.step_vectors.index(tile_schedule.MASK.SHARED * piece + i).load(
                    columns.type.layout
                )
            else:
                vector = self._vector(i, q_row, columns)
            of_queries = of_queries + (gl.expand_dims(vector, 0),)
        for i in gl.static_range(tile_schedule.MASK.KEYS):
            of_keys = of_keys + (gl.expand_dims(self.of_keys[i], 1),)
        ENDS: gl.constexpr = (
            tile_schedule.MASK.KEYS > 0 or tile_schedule.MASK.HAS_RANGES
        )  # then a form hides what is past the last key
        if not ENDS:
            keep = keys < work.kv_len
        for i in gl.static_range(len(tile_schedule.MASK.FORMS)):
            shown = tile_schedule.MASK.FORMS[i].test(True, *read_by(of_queries, of_keys, keys, tile_schedule.MASK, i))
            keep = shown if i == 0 and ENDS else keep & shown
        if tile_schedule.MASK.HAS_RANGES:
            return keep  # ranges end where band and keys do
        return within_band(keep, work, q_row, columns, rows, tile_schedule.MASK)


@gluon.jit
def allocate_packed_tiles_and_vectors(FORM, MASK):
    """Allocates the shared memory (packed_tiles, step_vectors) of a `TableTileSchedule`.

    If the mask has no vectors of queries, packed_tiles is returned twice.
    """
    PIECES: gl.constexpr = pieces(FORM.STEP)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    packed_tiles = allocate_int32(FORM.STAGES)
    vectors = packed_tiles
    if MASK.QUERIES > 0:
        shape: gl.constexpr = [MASK.SHARED * FORM.STAGES * PIECES, FORM.BLOCK_Q // PIECES]
        vectors = gl.allocate_shared_memory(gl.int32, shape, layout)
    return packed_tiles, vectors
