"""Allocates the shared memory of a CTA of the forward: operand tiles, rings of tiles, and their barriers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....common.device.aggregates import aggregate
from .listed import packed_tile_stages
from .sums import COLUMNS, fill_with_ones
from .tile_work import ROWS


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@aggregate
class SharedMemory:
    """The shared memory of a CTA of the forward: operand tiles, rings of tiles, and their barriers.

    q: [Q_STAGES * consumers, ROWS, columns], 16 bits, a ring of Q_STAGES q tiles with one tile per consumer; k, v:
    [STAGES, BLOCK_KV, columns], 16 bits; out: one [ROWS, columns] tile per consumer, which overwrites q with OUT_IN_Q.
    q_tail, k_tail: the TAIL_D columns past the first ones, if TAIL_D > 0. ones: with SUMS_BY_MATMUL, the ones of Note
    [Sums] in `sums`. facts: a ring of `fact_stages` entries of int32 values about q tiles, see `producer.announce`.
    packed_tiles: if LISTED (the mask is data), a ring of `packed_tile_stages`, see Note [Packed tiles] in `listed`.

    Barriers `*_full` are completed by the producer's copies, `*_empty` by an arrival of every consumer. If LISTED
    or PACKED, v_full has one more barrier, which is the producer's own, see `shared.device.clear`.
    """

    q: gl.shared_memory_descriptor
    q_tail: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    k_tail: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    ones: gl.shared_memory_descriptor
    facts: gl.shared_memory_descriptor
    packed_tiles: gl.shared_memory_descriptor
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
    PACKED: gl.constexpr


@gluon.constexpr_function
def document_fact(consumers):
    """Returns the index of the first of the three values that the producer announces of a q tile's document."""
    return 5 + 4 * consumers


@gluon.constexpr_function
def fact_words(consumers, packed):
    """Returns the number of int32 values that the producer announces of a q tile: five, four per consumer, and three of
    its document if documents are packed.
    """
    return document_fact(consumers) + 3 * packed


@gluon.constexpr_function
def fact_stages(q_stages, packed):
    """Returns for how many q tiles the announced values are kept: one more than there are Q tiles in shared memory.

    So the values of the next q tile are there before its Q.  When the producer loads the Q of a tile, all consumers
    have released the Q of the tile `q_stages` earlier, and have read the values of that tile.  The values of the next
    tile may then overwrite them.  With packed documents consumers read values while they store results, after they have
    released the Q: values are kept for one more tile.
    """
    return q_stages + 1 + packed


@gluon.jit
def _tiles(DTYPE: gl.constexpr, COUNT: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """Allocates COUNT tiles in the layout that TMA and the matmuls share."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, WIDTH], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [COUNT, HEIGHT, WIDTH], layout)


@gluon.jit
def _int32(COUNT: gl.constexpr):
    """Allocates COUNT int32 values."""
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def allocate_shared(DTYPE: gl.constexpr, FORM, LISTED: gl.constexpr, PACKED: gl.constexpr):
    """Allocates all shared memory of a CTA, a `SharedMemory`, and initialises its barriers.

    FORM: see `arguments.Form`; LISTED: the mask is data, so packed tile ids are needed; PACKED: documents are
    packed.
    """
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
    ones = q
    if FORM.SUMS_BY_MATMUL:
        ones = _tiles(DTYPE, 1, COLUMNS, BLOCK_KV).index(0)
        fill_with_ones(ones)
    tile_facts = _int32(fact_stages(Q_STAGES, PACKED) * fact_words(CONSUMERS, PACKED))
    packed_tiles = tile_facts
    if LISTED:
        packed_tiles = _int32(packed_tile_stages(STAGES))
    return SharedMemory(
        q=q,
        q_tail=q_tail,
        k=k,
        k_tail=k_tail,
        v=_tiles(DTYPE, STAGES, BLOCK_KV, BLOCK_DV),
        out=out,
        ones=ones,
        facts=tile_facts,
        packed_tiles=packed_tiles,
        q_full=_barriers(Q_STAGES, 1),
        q_empty=_barriers(Q_STAGES, CONSUMERS),
        k_full=_barriers(STAGES, 1),
        k_empty=_barriers(STAGES, CONSUMERS),
        v_full=_barriers(STAGES + (1 if LISTED or PACKED else 0), 1),
        v_empty=_barriers(STAGES, CONSUMERS),
        Q_STAGES=Q_STAGES,
        STAGES=STAGES,
        TAIL_D=TAIL_D,
        OUT_IN_Q=FORM.OUT_IN_Q,
        PACKED=PACKED,
    )
