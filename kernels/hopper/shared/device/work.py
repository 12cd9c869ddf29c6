"""The knowledge of the roles of a CTA: whose walk they are at (`Work`) and their shared memory (`Shared`)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....common.device.aggregates import aggregate, replace
from .operations import DQ_LAYOUT, DQ_ROW, as_tiles
from .step_words import allocate_words


@aggregate
class Work:
    """The head that a CTA is at, and what is the same for all of them.

    ``lo <= q - kv <= hi`` is the band of the mask, anchored top left.  Every query head has its own walks: `head` is
    the kv head, `member` the place of the query head in the group of GROUP that shares it.  To the schedule the query
    heads are the heads, member by member of all groups, so that a member of a group is launched after those before it.
    """

    batch: gl.tensor
    head: gl.tensor
    member: gl.tensor
    q_heads: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    n_q: gl.tensor
    SEEN_ROWS: gl.constexpr
    SEEN_KEYS: gl.constexpr
    GROUP: gl.constexpr
    BLOCK_Q: gl.constexpr
    BLOCK_KV: gl.constexpr

    @gluon.jit
    def at(self, position):
        """The same for the head at `position`, as the launch order counts the heads of all batch elements."""
        heads = self.q_heads // self.GROUP
        place = position % self.q_heads
        return replace(self, batch=position // self.q_heads, head=place % heads, member=place // heads)

    @gluon.jit
    def first_row(self):
        """The first query that sees a key of the band: row 0 of the descriptors of Q and dO."""
        first, _end = self.SEEN_ROWS(self.facts(), self.BLOCK_Q, self.BLOCK_KV)
        return first

    @gluon.jit
    def first_key(self):
        """The first key of the band that a query sees: row 0 of the descriptors of K and V."""
        first, _end = self.SEEN_KEYS(self.facts(), self.BLOCK_Q, self.BLOCK_KV)
        return first

    @gluon.jit
    def facts(self):
        """The tuple `walk` of the schedule's functions."""
        return self.q_len, self.kv_len, self.lo, self.hi

    @gluon.jit
    def q_head(self):
        """The query head, within its batch element."""
        return self.head * self.GROUP + self.member

    @gluon.jit
    def tile_index(self, q):
        """Place of (batch element, query head, q tile) in semaphores, dq accumulator, log-sum-exp and delta."""
        return (self.batch * self.q_heads + self.q_head()) * self.n_q + q


@gluon.constexpr_function
def pieces(step):
    """Pieces of a q tile in shared memory, for a form of a step."""
    return 2 if step == "halved" else 1


ENTRIES = gl.constexpr(2)
"""Entries of the ring of walks: the walk that the consumers are at, and the walk that the producer has begun."""


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """A ring of barriers for so many arrivals each."""
    ring = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(ring.index(i), count=ARRIVALS)
    return ring


@aggregate
class Shared:
    """Shared memory of a CTA: operand tiles, rings and their barriers.

    k, v: one tile each; q, lse, do, delta: rings of STAGES, in HALVES pieces per tile; ds, p: one tile; dq: a ring of
    DQ_STAGES fp32 tiles in the order of `steps.in_fragments`, by way of which dk and dv leave with RESULTS_IN_DQ, else
    by way of k and v; walks: a ring of ENTRIES pairs of words, see `tickets`; k_tail, q_tail, dq_tail: the columns past
    BLOCK_D, if TAIL_D > 0; turn: of a CTA in its group, see `group`.  STAMPED: there is a stamper.  CONSUMERS: their
    warps.  With CLEARS
    k_full, v_full, q_full and do_full have a barrier more, the last, which is the producer's own, see `clear`.  What
    consumers say at the end of a step needs no shared memory, see `ends`.
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
    turn: gl.shared_memory_descriptor
    walks: gl.shared_memory_descriptor
    walk_full: gl.shared_memory_descriptor
    walk_empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    DQ_STAGES: gl.constexpr
    TAIL_D: gl.constexpr
    HALVES: gl.constexpr
    RESULTS_PER_SLOT: gl.constexpr
    RESULTS_IN_DQ: gl.constexpr
    STAMPED: gl.constexpr
    CONSUMERS: gl.constexpr

    @gluon.jit
    def result_tile(self, it, RESULT: gl.constexpr):
        """The place of dv (RESULT 0) or dk (1) in slots of the dq ring, for steps `it` and after, once these are empty.

        They stay empty to producer and reducers: whoever stores a result waits until it has been read.
        """
        step = it + RESULT // self.RESULTS_PER_SLOT
        slot = step % self.DQ_STAGES
        mbarrier.wait(self.dq_empty.index(slot), ((step // self.DQ_STAGES) & 1) ^ 1)
        return as_tiles(self.dq.index(slot), self.k, self.RESULTS_PER_SLOT).index(RESULT % self.RESULTS_PER_SLOT)


@gluon.jit
def _tiles(DTYPE: gl.constexpr, shape: gl.constexpr):
    """A tile, or a ring of tiles, in the layout that TMA and the matmuls share."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([shape[-2], shape[-1]], DTYPE)
    return gl.allocate_shared_memory(DTYPE, shape, layout)


@gluon.jit
def _accumulators(COUNT: gl.constexpr, VALUES: gl.constexpr):
    """A ring of dq tiles of so many values."""
    return gl.allocate_shared_memory(gl.float32, [COUNT, VALUES // DQ_ROW, DQ_ROW], DQ_LAYOUT)


@gluon.jit
def allocate_shared(DTYPE: gl.constexpr, FORM, CLEARS: gl.constexpr, READERS: gl.constexpr, STAMPED: gl.constexpr):
    """All shared memory of a CTA, barriers initialised."""
    BLOCK_Q: gl.constexpr = FORM.BLOCK_Q
    BLOCK_KV: gl.constexpr = FORM.BLOCK_KV
    BLOCK_D: gl.constexpr = FORM.BLOCK_D
    TAIL_D: gl.constexpr = FORM.TAIL_D
    STAGES: gl.constexpr = FORM.STAGES
    DQ_STAGES: gl.constexpr = FORM.DQ_STAGES
    OWN: gl.constexpr = 1 if CLEARS else 0
    row_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=1)
    HALVES: gl.constexpr = pieces(FORM.STEP)
    PER_SLOT: gl.constexpr = 2 * BLOCK_Q // BLOCK_KV  # dq tiles have as many columns, of twice as many bits
    ds = _tiles(DTYPE, [BLOCK_KV, BLOCK_Q])
    p = ds
    if FORM.STEP == "shared":
        p = _tiles(DTYPE, [BLOCK_KV, BLOCK_Q])
    k = _tiles(DTYPE, [BLOCK_KV, BLOCK_D])
    q = _tiles(DTYPE, [STAGES * HALVES, BLOCK_Q // HALVES, BLOCK_D])
    dq = _accumulators(DQ_STAGES, BLOCK_Q * BLOCK_D)
    k_tail = k
    q_tail = q
    dq_tail = dq
    if TAIL_D > 0:
        k_tail = _tiles(DTYPE, [BLOCK_KV, TAIL_D])
        q_tail = _tiles(DTYPE, [STAGES * HALVES, BLOCK_Q // HALVES, TAIL_D])
        dq_tail = _accumulators(DQ_STAGES, BLOCK_Q * TAIL_D)
    turn = ds  # never read
    if FORM.GROUP > 1:
        turn = barriers(1)
    return Shared(
        k=k,
        k_tail=k_tail,
        v=_tiles(DTYPE, [BLOCK_KV, FORM.BLOCK_DV]),
        q=q,
        q_tail=q_tail,
        do=_tiles(DTYPE, [STAGES * HALVES, BLOCK_Q // HALVES, FORM.BLOCK_DV]),
        lse=gl.allocate_shared_memory(gl.float32, [STAGES * HALVES, BLOCK_Q // HALVES], row_layout),
        delta=gl.allocate_shared_memory(gl.float32, [STAGES * HALVES, BLOCK_Q // HALVES], row_layout),
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
        turn=turn,
        walks=allocate_words(2 * ENTRIES),
        walk_full=barriers(ENTRIES),
        walk_empty=barriers(ENTRIES, READERS),
        STAGES=STAGES,
        DQ_STAGES=DQ_STAGES,
        TAIL_D=TAIL_D,
        HALVES=HALVES,
        RESULTS_PER_SLOT=PER_SLOT,
        RESULTS_IN_DQ=TAIL_D == 0 and BLOCK_D == FORM.BLOCK_DV and DQ_STAGES * PER_SLOT >= 2,
        STAMPED=STAMPED,
        CONSUMERS=gl.num_warps(),
    )
