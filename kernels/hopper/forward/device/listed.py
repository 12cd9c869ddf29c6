"""Masks that are data: `ListedMask` lists the kv tiles of a q tile as packed tile ids, and masks scores elementwise.

Note [Packed tiles]
    A tile of the list has a row of packed tile ids, one for each kv tile that one of its row blocks sees, from the last
    kv tile to the first: ``kv | k0 << 16 | k1 << 18 | k2 << 20 | unseen << 22``, where k_c says what consumer c does
    with the kv tile (SKIP, PARTIAL or FULL), and `unseen` whether it has keys that no query sees.  A row block that
    sees no key, or that does not exist, has one PARTIAL packed tile id.

    Consumers learn the first packed tile id of a tile with its facts, and every other one with the kv tile before it:
    the producer puts the packed tile id of step ``s + 1`` into shared memory before the K of step s is full
    (`put_packed_tile`), and consumers read it before they leave the V of step s (`read_packed_tile`).  So a packed tile
    id is there when its step begins, and nobody waits for it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .....schedule.table_tile_schedule import FORWARD_UNSEEN
from ....common.device.aggregates import aggregate, group
from ....common.device.relations.form import read_by
from ...shared.device.operations import role_barrier

SKIP, PARTIAL, FULL = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""The uses that a consumer makes of a kv tile: give it back unread; test every score; nothing is hidden."""
UNSEEN = gl.constexpr(FORWARD_UNSEEN)


@gluon.jit
def kv_of(packed_tile):
    """Returns the kv tile's index (int32) in a packed tile id, see Note [Packed tiles]."""
    return packed_tile & 0xFFFF


@gluon.jit
def use_of(packed_tile, CONSUMER: gl.constexpr):
    """Returns how consumer CONSUMER uses the kv tile of a packed tile id (Note [Packed tiles]): SKIP, PARTIAL or FULL.

    It releases the tile unread, applies the elementwise mask, or needs no mask.
    """
    return (packed_tile >> (16 + 2 * CONSUMER)) & 3


@gluon.jit
def has_unseen(packed_tile):
    """Returns a bool: whether the kv tile of a packed tile id has keys that no query sees, see Note [Packed tiles].

    Rows of V at such keys may hold NaN, so the producer replaces them by zeros.
    """
    return (packed_tile & (1 << UNSEEN)) != 0


@aggregate
class ListedMask:
    """A mask that reads tensors: its lists of kv tiles, and its elementwise test inside of a kv tile.

    arguments: the group `arguments.DATA` of pointers, None where the mask is a band alone; GIVEN: whether there are
    arguments.  With HAS_DENSE no vectors are read: `seen` reads mask bits instead.  SEGMENT_IDS_AHEAD: in which
    iterations vectors are loaded before the matmul of the scores is issued, whose time hides the loads: in none (0), in
    the first of a run (1), or in all (2).  MASK: see `arguments.MaskKind`.  elements: the group `arguments.ELEMENTS`
    of the batch elements that are computed; None, with HAS_ELEMENTS false, if these are all.
    """

    arguments: group
    elements: group
    HAS_DENSE: gl.constexpr
    SEGMENT_IDS_AHEAD: gl.constexpr
    GIVEN: gl.constexpr
    HAS_ELEMENTS: gl.constexpr
    MASK: gl.tuple

    @gluon.jit
    def element(self, number):
        """Returns the index (int32) of the batch element with this number in the work list; 0 past the last one."""
        if self.HAS_ELEMENTS:
            exists = number < gl.load(self.elements.ptr)
            return gl.load(self.elements.ptr + 1 + number, mask=exists, other=0)
        else:
            return number

    @gluon.jit
    def table(self, b, head):
        """Returns the index (int32) of the table of packed tile ids for a batch element `b` and query head.

        If the mask does not differ between heads, all heads of a batch element use one table.
        """
        return b * self.arguments.tables + head % self.arguments.tables

    @gluon.jit
    def element_of(self, b, head):
        """Returns the index (int32) of the mask's vectors for a batch element and query head."""
        if self.MASK.BY_HEAD:
            return self.table(b, head)
        else:
            return b

    @gluon.jit
    def packed_tiles_of(self, work, b, head, q_tile):
        """Returns (pointer to the first packed tile id, number of packed tile ids) of a head's q tile.

        q_tile: its index among the head's tiles in the work list.  Packed tile ids are int32, see Note [Packed tiles].
        """
        row = self.table(b, head).to(gl.int64) * work.q_tiles() + q_tile
        kv_tiles = (work.kv_len + work.BLOCK_KV - 1) // work.BLOCK_KV
        return self.arguments.steps_ptr + row * kv_tiles, gl.load(self.arguments.counts_ptr + row)

    @gluon.jit
    def segment_ids(self, work, like, element, rows, kv):
        """Loads the mask's vectors for the queries `rows` and for the keys of kv tile `kv`: (a tuple of int32 [ROWS],
        one of int32 [BLOCK_KV]).

        like: a tensor in the layout of the scores [ROWS, BLOCK_KV], along whose rows and columns the vectors are
        distributed.  element: the vectors' index, see `element_of`.
        """
        row_exists = (rows >= 0) & (rows < work.q_len)
        of_element = element.to(gl.int64) * work.q_len
        queries = ()
        for i in gl.static_range(self.MASK.QUERIES):
            pointers = self.arguments.q_vectors + self.MASK.QUERIES * of_element + rows
            queries = queries + (gl.load(pointers + i * work.q_len, mask=row_exists, other=0),)
        keys = ()
        for i in gl.static_range(self.MASK.KEYS):
            vector = element.to(gl.int64) * self.MASK.KEYS + i
            keys = keys + (_of_keys(self.arguments.kv_vectors, work, like, vector, kv),)
        return queries, keys

    @gluon.jit
    def hide(self, work, s, segment_ids, element, rows, kv):
        """Returns the scores of kv tile `kv`, fp32 [ROWS, BLOCK_KV], set to -inf where a relation hides the key.

        The band is not applied here.  segment_ids: what the method `segment_ids` returns, or None if it has not been
        called yet.
        """
        if segment_ids is None:
            segment_ids = self.segment_ids(work, s, element, rows, kv)
        of_queries, of_keys = segment_ids
        queries, keys = (), ()
        for i in gl.static_range(self.MASK.QUERIES):
            queries = queries + (gl.expand_dims(of_queries[i], 1),)
        for i in gl.static_range(self.MASK.KEYS):
            keys = keys + (gl.expand_dims(of_keys[i], 0),)
        positions = s
        if self.MASK.READS_POSITIONS:
            positions = kv * work.BLOCK_KV + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
            positions = gl.expand_dims(positions, 0)
        for i in gl.static_range(len(self.MASK.FORMS)):
            s = self.MASK.FORMS[i].keep(s, *read_by(queries, keys, positions, self.MASK, i))
        return s


@gluon.jit
def _of_keys(ptr, work, like, vector, kv):
    """A number of each key of kv tile `kv`; ptr: int32 [vectors, kv_len]."""
    columns = gl.arange(0, work.BLOCK_KV, gl.SliceLayout(0, like.type.layout))
    if work.EVEN_KV:  # said so that loads are known to be aligned
        first = (vector * (work.kv_len // work.BLOCK_KV) + kv) * work.BLOCK_KV
        return gl.load(ptr + first + columns)
    else:
        keys = kv * work.BLOCK_KV + columns
        start = ptr + vector * work.kv_len
        return gl.load(start + keys, mask=keys < work.kv_len, other=0)


@gluon.constexpr_function
def packed_tile_stages(stages):
    """Returns the size of the ring of packed tile ids in shared memory, for rings of K and V with `stages` stages.

    When the producer loads the K of iteration s it has loaded the V of iteration ``s - 2``, so all consumers have
    released the V of iteration ``s - 2 - stages``, and read the packed tile id there.
    """
    return stages + 2


@gluon.jit
def put_packed_tile(shared, it, packed_tile):
    """Stores the packed tile id of iteration ``it + 1``; the producer does so before the K load of iteration `it`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    shared.packed_tiles.index(it % packed_tile_stages(shared.STAGES)).store(
        gl.full([1], 0, gl.int32, layout) + packed_tile
    )
    role_barrier()


@gluon.jit
def read_packed_tile(shared, it):
    """Returns the packed tile id of the CTA's iteration ``it + 1`` from the ring in shared memory.

    It may be read from the arrival of the K tile of iteration `it` until its V tile is released.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(shared.packed_tiles.index(it % packed_tile_stages(shared.STAGES)).load(layout), 0)
