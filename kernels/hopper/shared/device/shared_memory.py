"""Allocates the shared memory of a CTA of the backward: operand tiles, rings of tiles, and their barriers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....common.device.aggregates import aggregate
from .operations import DQ_LAYOUT, DQ_ROW, as_tiles
from .packed_tiles import allocate_int32


@gluon.constexpr_function
def pieces(step):
    """Returns the number of pieces of a q tile in shared memory, for a form of step (`arguments.Form.STEP`)."""
    return 2 if step == "halved" else 1


ENTRIES = gl.constexpr(2)
"""Entries of the ring of work items: the one that consumers compute, and the one that the producer has begun."""


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """Allocates and initialises COUNT mbarriers, each of which expects ARRIVALS arrivals."""
    ring = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(ring.index(i), count=ARRIVALS)
    return ring


@aggregate
class SharedMemory:
    """The shared memory of a CTA of the backward: operand tiles, rings of tiles, and their barriers.

    k: [BLOCK_KV, BLOCK_D] and v: [BLOCK_KV, BLOCK_DV], 16 bits, of the CTA's kv tile. q: [STAGES * PIECES, BLOCK_Q /
    PIECES, BLOCK_D] and do: the same with BLOCK_DV columns, 16 bits; lse, delta: fp32 [STAGES * PIECES, BLOCK_Q /
    PIECES]: rings of STAGES q tiles, each in PIECES pieces. ds, p: dS and P, 16 bits [BLOCK_KV, BLOCK_Q]. dq: a ring of
    DQ_STAGES fp32 tiles in the order of `steps.in_fragments`, through which dk and dv leave with RESULTS_IN_DQ,
    otherwise through k and v. k_tail, q_tail, dq_tail: the TAIL_D columns past BLOCK_D, if TAIL_D > 0. tile_schedules:
    a ring of ENTRIES work items, pairs of int32, see `work_ids`; group_barrier: the barrier of a CTA in its group, see
    `group`.

    Barriers `*_full` are completed when a tile has arrived, `*_empty` when it has been read. If the kernel clears rows
    that take no part, see `clear`, k_full, v_full, q_full and do_full have one more barrier, the last, which is the
    producer's own. STAMPED: a role records timestamps. CONSUMERS: the number of consumer warps. The signals that
    consumers give at the end of a step need no shared memory, see `step_signals`.
    """

    k: gl.shared_memory_descriptor
    k_tail: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    q_tail: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    dq_tail: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
    group_barrier: gl.shared_memory_descriptor
    tile_schedules: gl.shared_memory_descriptor
    tile_schedule_full: gl.shared_memory_descriptor
    tile_schedule_empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    DQ_STAGES: gl.constexpr
    TAIL_D: gl.constexpr
    PIECES: gl.constexpr
    RESULTS_PER_STAGE: gl.constexpr
    RESULTS_IN_DQ: gl.constexpr
    STAMPED: gl.constexpr
    CONSUMERS: gl.constexpr

    @gluon.jit
    def result_tile(self, it, RESULT: gl.constexpr):
        """Returns a tile in the dq ring through which dv (RESULT 0) or dk (1) leaves, after waiting until it is empty.

        It takes the stages of step `it` and after.  Producer and reducers go on treating them as empty: whoever stores
        a result waits until it has been read.
        """
        step = it + RESULT // self.RESULTS_PER_STAGE
        stage = step % self.DQ_STAGES
        mbarrier.wait(self.dq_empty.index(stage), ((step // self.DQ_STAGES) & 1) ^ 1)
        return as_tiles(self.dq.index(stage), self.k, self.RESULTS_PER_STAGE).index(RESULT % self.RESULTS_PER_STAGE)


@gluon.jit
def _tiles(DTYPE: gl.constexpr, shape: gl.constexpr):
    """A tile, or a ring of tiles, in the layout that TMA and the matmuls share."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([shape[-2], shape[-1]], DTYPE)
    return gl.allocate_shared_memory(DTYPE, shape, layout)


@gluon.jit
def _accumulators(COUNT: gl.constexpr, VALUES: gl.constexpr):
    """Allocates a ring of COUNT dq tiles of VALUES values."""
    return gl.allocate_shared_memory(gl.float32, [COUNT, VALUES // DQ_ROW, DQ_ROW], DQ_LAYOUT)


@gluon.jit
def allocate_shared(DTYPE: gl.constexpr, FORM, CLEARS: gl.constexpr, READERS: gl.constexpr, STAMPED: gl.constexpr):
    """Allocates the shared memory of a CTA and initialises its barriers; returns a `SharedMemory`.

    FORM: see `arguments.Form`.  CLEARS: whether the producer zeroes rows that take no part, see `clear`.  READERS: how
    many arrivals release a work item.  STAMPED: whether a role records timestamps.
    """
    BLOCK_Q: gl.constexpr = FORM.BLOCK_Q
    BLOCK_KV: gl.constexpr = FORM.BLOCK_KV
    BLOCK_D: gl.constexpr = FORM.BLOCK_D
    TAIL_D: gl.constexpr = FORM.TAIL_D
    STAGES: gl.constexpr = FORM.STAGES
    DQ_STAGES: gl.constexpr = FORM.DQ_STAGES
    OWN: gl.constexpr = 1 if CLEARS else 0
    row_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=1)
    PIECES: gl.constexpr = pieces(FORM.STEP)
    PER_STAGE: gl.constexpr = 2 * BLOCK_Q // BLOCK_KV  # dq tiles have as many columns, of twice as many bits
    ds = _tiles(DTYPE, [BLOCK_KV, BLOCK_Q])
    p = ds
    if FORM.STEP == "shared":
        p = _tiles(DTYPE, [BLOCK_KV, BLOCK_Q])
    k = _tiles(DTYPE, [BLOCK_KV, BLOCK_D])
    q = _tiles(DTYPE, [STAGES * PIECES, BLOCK_Q // PIECES, BLOCK_D])
    dq = _accumulators(DQ_STAGES, BLOCK_Q * BLOCK_D)
    k_tail = k
    q_tail = q
    dq_tail = dq
    if TAIL_D > 0:
        k_tail = _tiles(DTYPE, [BLOCK_KV, TAIL_D])
        q_tail = _tiles(DTYPE, [STAGES * PIECES, BLOCK_Q // PIECES, TAIL_D])
        dq_tail = _accumulators(DQ_STAGES, BLOCK_Q * TAIL_D)
    group_barrier = ds  # never read
    if FORM.GROUP > 1:
        group_barrier = barriers(1)
    return SharedMemory(
        k=k,
        k_tail=k_tail,
        v=_tiles(DTYPE, [BLOCK_KV, FORM.BLOCK_DV]),
        q=q,
        q_tail=q_tail,
        do=_tiles(DTYPE, [STAGES * PIECES, BLOCK_Q // PIECES, FORM.BLOCK_DV]),
        lse=gl.allocate_shared_memory(gl.float32, [STAGES * PIECES, BLOCK_Q // PIECES], row_layout),
        delta=gl.allocate_shared_memory(gl.float32, [STAGES * PIECES, BLOCK_Q // PIECES], row_layout),
        ds=ds,
        p=p,
        dq=dq,
        dq_tail=dq_tail,
        k_full=barriers(1 + OWN),
        v_full=barriers(1 + OWN),
        kv_empty=barriers(1),
        q_full=barriers(STAGES + OWN),
        do_full=barriers(STAGES + OWN),
        dq_empty=barriers(DQ_STAGES),
        group_barrier=group_barrier,
        tile_schedules=allocate_int32(2 * ENTRIES),
        tile_schedule_full=barriers(ENTRIES),
        tile_schedule_empty=barriers(ENTRIES, READERS),
        STAGES=STAGES,
        DQ_STAGES=DQ_STAGES,
        TAIL_D=TAIL_D,
        PIECES=PIECES,
        RESULTS_PER_STAGE=PER_STAGE,
        RESULTS_IN_DQ=TAIL_D == 0 and BLOCK_D == FORM.BLOCK_DV and DQ_STAGES * PER_STAGE >= 2,
        STAMPED=STAMPED,
        CONSUMERS=gl.num_warps(),
    )
