"""A band in closed form: the tile schedule of a kv tile (`ClosedFormTileSchedule`) and its elementwise mask
(`BandMask`).

`table_tile_schedule` defines the same functions for masks that are data.  The warp roles use either module, and
identify a step only by its *packed tile id*: a number that tells which q tile is visited and whether the mask cuts it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....common.device.aggregates import aggregate, replace
from ...shared.device.head_work import HeadWork
from ...shared.device.operations import here
from ...shared.device.packed_tiles import MASKED, NEXT, put_int32, read_int32, within_band


@aggregate
class ClosedFormTileSchedule:
    """The tile schedules of a head under a band, computed by the functions that the schedule generates.

    packed_tiles: a ring of packed tile ids for consumers, see Note [Packed tiles of steps] in `packed_tiles`. SCHEDULE,
    MASK: see `arguments.Schedule` and `arguments.MaskKind`.  NEEDS_PACKED_TILES: consumers need packed tile ids.
    SPLITS_LOOPS: the band or the end of the keys cuts tiles, and packed tile ids say whether it cuts the next step, see
    Note [Split loops] in `split_loops`.  CLEARS: the producer must zero rows that take no part; false, because they lie
    outside of the descriptors.
    """

    work: HeadWork
    packed_tiles: gl.shared_memory_descriptor
    SCHEDULE: gl.tuple
    MASK: gl.tuple
    SPLITS_LOOPS: gl.constexpr
    NEEDS_PACKED_TILES: gl.constexpr
    CLEARS: gl.constexpr = False

    @gluon.jit
    def at(self, position):
        """Returns a copy of these tile schedules for the head at `position` of the launch order."""
        return replace(self, work=self.work.at(position))

    @gluon.jit
    def steps(self, kv):
        """Returns the number of iterations (visited q tiles) of kv tile `kv`; 0 past the last kv tile."""
        work = self.work
        steps = self.SCHEDULE.VISITS(kv, work.facts(), work.BLOCK_Q, work.BLOCK_KV)
        return gl.where(kv * work.BLOCK_KV < work.kv_len, steps, 0)

    @gluon.jit
    def packed_tile(self, step, kv):
        work = self.work
        q = self.SCHEDULE.Q_TILE(kv, step, work.facts(), work.BLOCK_Q, work.BLOCK_KV)
        if self.SPLITS_LOOPS:
            _first, full_first, full_end, _end = self.SCHEDULE.Q_RANGE(kv, work.facts(), work.BLOCK_Q, work.BLOCK_KV)
            q |= gl.where((q < full_first) | (q >= full_end), 1 << MASKED, 0)
        return q

    @gluon.jit
    def q_tile(self, packed_tile):
        return packed_tile & ((1 << NEXT) - 1)

    @gluon.jit
    def rank(self, packed_tile, kv):
        work = self.work
        return self.SCHEDULE.RANK(self.q_tile(packed_tile), kv, work.facts(), work.BLOCK_Q, work.BLOCK_KV)

    @gluon.jit
    def begin(self, step, kv):
        """Returns the packed tile id (q tile, and whether the mask cuts it) of iteration `step` of kv tile `kv`.

        A role calls this for its first iteration, and `following` for the others.
        """
        return self.packed_tile(step, kv)

    @gluon.jit
    def following(self, ahead, step, after, steps, kv):
        """Returns (the complete packed tile id of iteration `step`, that of iteration `after` without its `NEXT` bits).

        ahead: the packed tile id of `step`, from `begin` or the previous call; after: the role's next iteration; steps:
        the number of iterations.  A packed tile id is computed one iteration ahead; otherwise the producer's loads
        would wait for it.
        """
        following = self.packed_tile(after, kv)
        return ahead | (gl.where(after < steps, following >> MASKED, 2) << NEXT), following

    @gluon.jit
    def put_packed_tile(self, packed_tile, stage, full):
        """Passes the packed tile id of an iteration to the consumers, if they need it; called by the producer.

        It must be called before the dO barrier of `stage` is armed; `full` is that barrier, unused here.
        """
        if self.NEEDS_PACKED_TILES:
            put_int32(self.packed_tiles, stage, packed_tile)

    @gluon.jit
    def mask(self, kv, LAYOUT: gl.constexpr):
        """Returns the elementwise mask of kv tile `kv`, a `BandMask`; LAYOUT, that of the scores, is unused here."""
        return BandMask(self, kv)


@aggregate
class BandMask:
    """A kv tile's mask under a band: query q sees a key if ``lo <= q - key <= hi`` and ``key < kv_len``."""

    tile_schedule: ClosedFormTileSchedule
    kv: gl.tensor

    @gluon.jit
    def q_tile(self, packed_tile):
        return self.tile_schedule.q_tile(packed_tile)

    @gluon.jit
    def read_packed_tile(self, stage):
        """Reads the packed tile id (q tile, and whether the mask cuts it) of the iteration whose dO is in stage `stage`
        of its ring.

        Returns 0 if consumers need no packed tile ids.
        """
        packed_tile = 0
        if self.tile_schedule.NEEDS_PACKED_TILES:
            packed_tile = read_int32(self.tile_schedule.packed_tiles, stage)
        return packed_tile

    @gluon.jit
    def ask(self, packed_tile, PIECE: gl.constexpr):
        """Returns what `applied` needs from memory: nothing."""
        return packed_tile

    @gluon.jit
    def applied(self, p, _asked, packed_tile, stage, PIECE: gl.constexpr, CUT: gl.constexpr):
        """Returns `p`, the probabilities [keys, queries] of a piece of an iteration's q tile, with zeros where the mask
        hides the key.

        PIECE: the index of the piece; CUT: whether the mask cuts the tile, None if only the packed tile id says so.
        """
        tile_schedule = self.tile_schedule
        if tile_schedule.SPLITS_LOOPS:
            cut = packed_tile >> MASKED != 0 if CUT is None else CUT
            if cut:
                work = tile_schedule.work
                columns: gl.constexpr = gl.SliceLayout(0, p.type.layout)
                keys: gl.constexpr = gl.SliceLayout(1, p.type.layout)
                q_row = tile_schedule.q_tile(packed_tile) * work.BLOCK_Q + PIECE * p.shape[1]
                rows = here(self.kv) * work.BLOCK_KV + gl.arange(0, work.BLOCK_KV, keys)
                keep = gl.expand_dims(rows, 1) < work.kv_len
                if tile_schedule.MASK.EVEN_KV:  # which the compiler cannot know
                    keep = gl.full(keep.shape, True, gl.int1, keep.type.layout)
                queries = gl.arange(0, p.shape[1], columns)
                p = gl.where(within_band(keep, work, q_row, queries, rows, tile_schedule.MASK), p, 0.0)
        return p
