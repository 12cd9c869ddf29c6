"""One step of the backward's consumers: five matmuls, in an order that depends on the head dim.

Scores are computed transposed, S = K Q^T of [BLOCK_KV, BLOCK_Q].  A step adds to dk and dv, which stay in registers,
and hands its dq tile over to the reducers.  There are three forms, for the registers and shared memory that head dims
leave:

* `overlapped_step` has dK in flight while it stores its dq tile, and queues S of the next step before dK is done;
* `halved_step` does the two halves of a q tile one after the other, where S and dP of a whole one would not fit the
  registers along with dk and dv, or where K and V as left operands take their place (a matmul whose left operand is in
  registers reads half as much shared memory, which is what limits small head dims);
* `shared_step` passes P and dS to the matmuls through shared memory, where two warpgroups share the rows of a kv tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from .operations import DQ_ROW, hold_back, role_barrier, wait_for_matmuls, wait_for_own_stores
from .step_signals import DQ_COMPLETE, NOTED, ROOM, signal


@gluon.constexpr_function
def accumulator_layout(rows, columns, warps):
    """Returns the register layout of a matmul's [rows, columns] result for this number of warps.

    Warps are placed along the rows first, 16 rows for each, then along the columns.
    """
    along_rows = min(warps, rows // 16)
    along_columns = warps // along_rows
    return gl.NVMMADistributedLayout([3, 0], [along_rows, along_columns], [16, columns // along_columns, 16])


@gluon.constexpr_function
def left_operand(layout):
    """Returns the register layout of the left operand of a matmul whose result has `layout`."""
    return gl.DotOperandLayout(0, layout, 2)


@gluon.jit
def probabilities(mask, drops, score, s, lse, packed_tile, stage, PIECE: gl.constexpr, CUT: gl.constexpr = None):
    """Returns (P, slopes) of a piece of a step's q tile, [keys, queries], from the unscaled scores `s`.

    P is masked, and with dropout negative where it is dropped (Note [Signs of probabilities] in `dropout`).  Slopes are
    for `Score.through`, which uses them only if scores are bounded.  lse: the queries' log-sum-exp, base 2, in shared
    memory; stage: the stage of dO; PIECE: the index of the piece; CUT: whether the mask cuts the tile, None if only the
    packed tile id says so.
    """
    columns: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    asked = mask.ask(packed_tile, PIECE)
    if score.BOUNDED:
        s, far = score.begun(s, False)
        p, slope = score.powers_and_slopes(s, far, gl.expand_dims(lse.load(columns), 0))
    else:
        p = gl.exp2(s * score.factor - gl.expand_dims(lse.load(columns), 0))
        slope = p
    return drops.marked(
        mask.applied(p, asked, packed_tile, stage, PIECE, CUT), mask.q_tile(packed_tile), mask.kv, PIECE
    ), slope


@gluon.jit
def in_fragments(dq):
    """Returns a matmul's [rows, columns] accumulator as [.., DQ_ROW], in the order in which registers hold it.

    16 rows and 8 columns are 128 values, four to a thread: row ``8 h + i``, column ``2 j + e`` is value ``2 h + e`` of
    thread ``4 i + j``.  In that order every thread stores 16 bytes next to its neighbour's, without bank conflicts;
    `finish` restores the order of the matrix.
    """
    ROWS: gl.constexpr = dq.shape[0]
    COLUMNS: gl.constexpr = dq.shape[1]
    parts = dq.reshape([ROWS // 16, 2, 8, COLUMNS // 8, 4, 2]).permute([0, 3, 2, 4, 1, 5])
    return parts.reshape([ROWS * COLUMNS // DQ_ROW, DQ_ROW])


@gluon.jit
def from_fragments(fragments, tile):
    """Returns the output of `in_fragments` as a matrix again, with the shape and layout of `tile`."""
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    parts = fragments.reshape([ROWS // 16, COLUMNS // 8, 8, 4, 2, 2]).permute([0, 4, 2, 1, 3, 5])
    return gl.convert_layout(parts.reshape([ROWS, COLUMNS]), tile.type.layout, assert_trivial=True)


@gluon.jit
def wait_for_q(shared, it):
    """Waits until the Q tile of the CTA's it-th iteration has arrived, and returns its stage."""
    stage = it % shared.STAGES
    mbarrier.wait(shared.q_full.index(stage), (it // shared.STAGES) & 1)
    return stage


@gluon.jit
def wait_for_do(shared, it):
    stage = it % shared.STAGES
    mbarrier.wait(shared.do_full.index(stage), (it // shared.STAGES) & 1)
    return stage


@gluon.jit
def begin_drops(drops):
    """With dropout, keeps later instructions after the matmuls that have been issued.

    Otherwise ptxas would spread random number generation among the matmuls, and the tensor cores would wait for it.
    """
    if drops.GIVEN:
        hold_back(drops.work.q_len)


@gluon.jit
def share_ds(shared, ds, LEAVING: gl.constexpr = False):
    """Stores dS to shared memory for the matmuls of all warps, once all have read the dS of the previous iteration.

    LEAVING: whether results of the previous tile schedule may still be on their way out of the dq ring; if so, this
    also waits until they have been copied.
    """
    role_barrier()
    shared.ds.store(ds)
    fence_async_shared()
    if LEAVING:
        wait_for_own_stores()
    role_barrier()


@gluon.jit
def scores(left, shared, tile, zero):
    """Issues the asynchronous matmul S = K Q^T, with K from registers or shared memory and a piece of the Q ring.

    left: K; tile: the index of the piece; zero: an accumulator of the result's shape, [keys, queries].
    """
    s = warpgroup_mma(left, shared.q.index(tile).permute((1, 0)), zero, use_acc=False, is_async=True)
    if shared.TAIL_D > 0:
        s = warpgroup_mma(shared.k_tail, shared.q_tail.index(tile).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def matmul_dq(shared, WARPS: gl.constexpr):
    """Issues the asynchronous matmul dQ = dS^T K and returns (dQ, dQ of the tail's columns), fp32."""
    left = shared.ds.permute((1, 0))
    dq = zeros(shared.ds.shape[1], shared.k.shape[1], WARPS)
    dq = warpgroup_mma(left, shared.k, dq, use_acc=False, is_async=True)
    dq_tail = zeros(shared.ds.shape[1], shared.k_tail.shape[1], WARPS)
    if shared.TAIL_D > 0:
        dq_tail = warpgroup_mma(left, shared.k_tail, dq_tail, use_acc=False, is_async=True)
    return dq, dq_tail


@gluon.jit
def zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr):
    return gl.zeros([ROWS, COLUMNS], gl.float32, accumulator_layout(ROWS, COLUMNS, WARPS))


@gluon.jit
def add_product(a, right, accumulator, WARPS: gl.constexpr):
    """Issues the matmul ``accumulator += a @ right``, with `a` in registers, rounded to the dtype of `right`."""
    layout: gl.constexpr = left_operand(accumulator_layout(a.shape[0], right.shape[1], WARPS))
    left = gl.convert_layout(a.to(right.dtype), layout, assert_trivial=True)
    return warpgroup_mma(left, right, accumulator, is_async=True)


@gluon.jit
def deltas(shared, tile, p):
    """Loads delta of a piece of the queries, fp32 [1, queries], distributed as the columns of `p`.

    tile: the index of the piece in the ring.
    """
    return gl.expand_dims(shared.delta.index(tile).load(gl.SliceLayout(0, p.type.layout)), 0)


@gluon.jit
def gradient_of_scores(shared, drops, p, dp, delta):
    """Returns dS = P (dP - delta), [keys, queries], rounded to the dtype of K.

    p: fp32 probabilities; with dropout, negative where they are dropped (Note [Signs of probabilities] in `dropout`).
    dp: the gradient of P before dropout's rescaling.  delta: the row sums of O dO, [1, queries].
    """
    return drops.gradient(p, dp, delta).to(shared.k.dtype)


@gluon.jit
def wait_for_dq_room(shared, it):
    """Waits until the reducers have emptied the stage of the dq ring that iteration `it` uses."""
    mbarrier.wait(shared.dq_empty.index(it % shared.DQ_STAGES), ((it // shared.DQ_STAGES) & 1) ^ 1)


@gluon.jit
def hand_over(shared, it, dq, dq_tail, WARPS: gl.constexpr):
    """Stores the dq tile of iteration `it` to its stage of the dq ring, which must be empty, and signals the reducer.

    dq_tail: the columns of the tail, stored to their own ring; WARPS: the number of consumer warps.
    """
    stage = it % shared.DQ_STAGES
    shared.dq.index(stage).store(in_fragments(dq))
    if shared.TAIL_D > 0:
        shared.dq_tail.index(stage).store(in_fragments(dq_tail))
    fence_async_shared()
    signal(shared, DQ_COMPLETE, it, WARPS)


@gluon.jit
def end_step(shared, it, WARPS: gl.constexpr):
    """Signals that the matmuls have read Q and dO of iteration `it`, so that the producer may overwrite them.

    WARPS: the number of consumer warps.
    """
    signal(shared, ROOM, it, WARPS)
    if shared.STAMPED:
        signal(shared, NOTED, it, WARPS)


@gluon.jit
def overlapped_step(shared, mask, drops, score, it, after, s, dk, dv, zero, WARPS: gl.constexpr):
    """Computes step `it` of the backward from its S, and ends with the S of step `after`; returns (that S, dk, dv).

        queued                              meanwhile
        dP                                  softmax
        dV                                  dS
        dQ, dK                              dq tile to its buffer
        S of the step after

    `after` is the next step, or `it` again if `it` is the last one; the last S is then computed for nothing.  There is
    room for the tiles of another step when dK is done; `step_signals` says why an S that nobody needs may read its Q
    after that.
    """
    stage = wait_for_do(shared, it)
    packed_tile = mask.read_packed_tile(stage)
    do = shared.do.index(stage)
    dp = warpgroup_mma(shared.v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    begin_drops(drops)
    p, slope = probabilities(mask, drops, score, s, shared.lse.index(stage), packed_tile, stage, 0)
    delta = deltas(shared, stage, p)
    dv = add_product(drops.rounded(p, do.dtype), do, dv, WARPS)
    p = score.through(p, slope)
    dp = wait_for_matmuls(1, deps=(dp,))
    ds = gradient_of_scores(shared, drops, p, dp, delta)
    share_ds(shared, ds, shared.RESULTS_IN_DQ)
    dq, dq_tail = matmul_dq(shared, WARPS)
    dk = add_product(ds, shared.q.index(stage), dk, WARPS)
    wait_for_dq_room(shared, it)
    dq, dv = wait_for_matmuls(1, deps=(dq, dv))
    hand_over(shared, it, dq, dq_tail, WARPS)
    s = scores(shared.k, shared, wait_for_q(shared, after), zero)
    dk = wait_for_matmuls(1, deps=(dk,))
    end_step(shared, it, WARPS)
    s = wait_for_matmuls(0, deps=(s,))
    return s, dk, dv


@gluon.jit
def halved_step(
    shared, mask, drops, score, it, after, packed_tile, s0, k, v, dk, dk_tail, dv, zero, WARPS: gl.constexpr,
    AHEAD: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    """Computes step `it` of the backward, one half of the q tile after the other; returns (next S, dk, dk_tail, dv).

    k, v: in registers or shared memory.  With AHEAD the step begins with s0, the S of its first half, and ends with
    that of step `after`: the next step, or `it` again if `it` is the last one.  With tail columns (TAIL_D > 0) no
    registers are left to overlap matmuls with the next half or to read values ahead: every half ends with a wait for
    its matmuls, and delta is read when it is used.
    """
    TAIL: gl.constexpr = shared.TAIL_D > 0
    gl.static_assert(AHEAD != TAIL)
    stage = it % shared.STAGES
    tile = stage * 2
    do0 = shared.do.index(tile)
    do1 = shared.do.index(tile + 1)
    if AHEAD:
        dp0 = warpgroup_mma(v, do0.permute((1, 0)), zero, use_acc=False, is_async=True)
        s1 = scores(k, shared, tile + 1, zero)
    else:
        s0 = scores(k, shared, tile, zero)
        dp0 = warpgroup_mma(v, do0.permute((1, 0)), zero, use_acc=False, is_async=True)
        s0 = wait_for_matmuls(1, deps=(s0,))
    if AHEAD:
        begin_drops(drops)
    p, slope = probabilities(mask, drops, score, s0, shared.lse.index(tile), packed_tile, stage, 0, CUT)
    if AHEAD:
        delta = deltas(shared, tile, p)
    dv = add_product(drops.rounded(p, do0.dtype), do0, dv, WARPS)
    p = score.through(p, slope)
    dp0 = wait_for_matmuls(2 if AHEAD else 1, deps=(dp0,))
    if not AHEAD:
        delta = deltas(shared, tile, p)
    ds0 = gradient_of_scores(shared, drops, p, dp0, delta)
    dk = add_product(ds0, shared.q.index(tile), dk, WARPS)
    if TAIL:
        dk_tail = add_product(ds0, shared.q_tail.index(tile), dk_tail, WARPS)
        dv, dk, dk_tail = wait_for_matmuls(0, deps=(dv, dk, dk_tail))
    if not AHEAD:
        s1 = scores(k, shared, tile + 1, zero)
    dp1 = warpgroup_mma(v, do1.permute((1, 0)), zero, use_acc=False, is_async=True)
    s1 = wait_for_matmuls(3 if AHEAD else 1, deps=(s1,))
    if AHEAD:
        begin_drops(drops)
    p, slope = probabilities(mask, drops, score, s1, shared.lse.index(tile + 1), packed_tile, stage, 1, CUT)
    if AHEAD:
        delta = deltas(shared, tile + 1, p)
    dv = add_product(drops.rounded(p, do1.dtype), do1, dv, WARPS)
    p = score.through(p, slope)
    dp1 = wait_for_matmuls(1, deps=(dp1,))
    if not AHEAD:
        delta = deltas(shared, tile + 1, p)
    ds1 = gradient_of_scores(shared, drops, p, dp1, delta)
    dk = add_product(ds1, shared.q.index(tile + 1), dk, WARPS)
    if TAIL:
        dk_tail = add_product(ds1, shared.q_tail.index(tile + 1), dk_tail, WARPS)
        dv, dk, dk_tail = wait_for_matmuls(0, deps=(dv, dk, dk_tail))
    share_ds(shared, gl.join(ds0, ds1).permute([0, 2, 1]).reshape(shared.ds.shape))
    dq, dq_tail = matmul_dq(shared, WARPS)
    if AHEAD:
        s0 = scores(k, shared, wait_for_q(shared, after) * 2, zero)
        wait_for_dq_room(shared, it)
        dq, dv, dk = wait_for_matmuls(1, deps=(dq, dv, dk))
    else:
        wait_for_dq_room(shared, it)
        dq, dq_tail = wait_for_matmuls(0, deps=(dq, dq_tail))
    hand_over(shared, it, dq, dq_tail, WARPS)
    if AHEAD:
        s0 = wait_for_matmuls(0, deps=(s0,))
    end_step(shared, it, WARPS)
    return s0, dk, dk_tail, dv


@gluon.jit
def shared_step(shared, mask, drops, score, it, dk, dv, zero, WARPS: gl.constexpr):
    """Computes step `it` of the backward, with P and dS as left operands in shared memory; returns (dk, dv)."""
    stage = wait_for_q(shared, it)
    s = scores(shared.k, shared, stage, zero)
    wait_for_do(shared, it)
    packed_tile = mask.read_packed_tile(stage)
    do = shared.do.index(stage)
    dp = warpgroup_mma(shared.v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = wait_for_matmuls(1, deps=(s,))
    p, slope = probabilities(mask, drops, score, s, shared.lse.index(stage), packed_tile, stage, 0)
    role_barrier()  # all have read P and dS of the step before
    shared.p.store(drops.rounded(p, shared.k.dtype))
    p = score.through(p, slope)
    fence_async_shared()
    role_barrier()
    dv = warpgroup_mma(shared.p, do, dv, is_async=True)
    dp = wait_for_matmuls(1, deps=(dp,))
    delta = deltas(shared, stage, p)
    shared.ds.store(gradient_of_scores(shared, drops, p, dp, delta))
    fence_async_shared()
    role_barrier()
    dq, dq_tail = matmul_dq(shared, WARPS)
    dk = warpgroup_mma(shared.ds, shared.q.index(stage), dk, is_async=True)
    wait_for_dq_room(shared, it)
    dq, dv, dk = wait_for_matmuls(0, deps=(dq, dv, dk))
    hand_over(shared, it, dq, dq_tail, WARPS)
    end_step(shared, it, WARPS)
    return dk, dv
