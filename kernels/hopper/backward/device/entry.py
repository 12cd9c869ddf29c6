"""The main kernel of the backward: a CTA splits into warp roles, which work on one work id after the other."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...shared.device.dropout import DropoutSigns, NoDropout
from ...shared.device.head_work import HeadWork
from ...shared.device.packed_tiles import allocate_int32
from ...shared.device.shared_memory import allocate_shared, barriers
from ...shared.device.varlen_layout import VarlenLayout
from .closed_form import ClosedFormTileSchedule
from .consumer import consume
from .producer import produce
from .reducer import Share, reduce
from .stamps import NoStamps, Stamps, stamp_steps
from .table_tile_schedule import TableTileSchedule, allocate_packed_tiles_and_vectors


@gluon.jit
def hopper_backward(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, dq_desc, lse_desc, delta_desc, workspace, problem,
    data, dropout, varlen_layout, targets, stamped, bound, SCHEDULE, MASK, FORM,
):  # fmt: skip
    """Computes dk, dv and the fp32 accumulator of dq, still without the scale, of an attention backward.

    q, do: [batch, q_heads, q_len, D or DV]; k, v, dk, dv: [batch, q_heads // GROUP, kv_len, D or DV], fp16 or bf16,
    descriptors with blocks of 64 columns of one tile; D is up to BLOCK_D + TAIL_D.  The descriptors of q and do cover
    only the rows that see any key, those of k and v only the keys that any row sees; all other rows and keys arrive as
    zeros.  dq: fp32 [batch * q_heads * n_q * BLOCK_Q * (BLOCK_D + TAIL_D) / DQ_ROW, DQ_ROW], in the order of
    `in_fragments`; lse (base 2) and delta: fp32 [batch * q_heads * n_q * BLOCK_Q], with ``lse = inf`` and ``delta = 0``
    in rows that see no key and past q_len.

    All other arguments are groups, see `arguments`: data is given where the mask is data, see `table_tile_schedule`;
    dropout, if probabilities are dropped, see `dropout`; bound, if scores are bounded, see `score_gluon`; with
    `stamped` the kernel records timestamps, see `stamps`.  With `varlen_layout`, q_len and kv_len count padded rows,
    dq, lse and delta have padded rows, and the other tensors have tokens; only then there are targets, the groups
    `arguments.target` of dk and dv.
    """
    gdc_wait()  # for `prepare`
    gdc_launch_dependents()  # `finish` may begin once all CTAs have: not before, it reads what `prepare` resets
    n_q = (problem.q_len + FORM.BLOCK_Q - 1) // FORM.BLOCK_Q
    nobody = gl.to_tensor(0)
    work = HeadWork(
        nobody, nobody, nobody, problem.q_heads, problem.q_len, problem.kv_len, problem.lo, problem.hi, n_q,
        SCHEDULE.SEEN_ROWS, SCHEDULE.SEEN_KEYS, FORM.GROUP, FORM.BLOCK_Q, FORM.BLOCK_KV,
    )  # fmt: skip
    if data is not None:
        packed_tiles, step_vectors = allocate_packed_tiles_and_vectors(FORM, MASK)
        tile_schedules = TableTileSchedule(work, data, packed_tiles, step_vectors, MASK)
    else:
        CUTS: gl.constexpr = MASK.HAS_LO or MASK.HAS_HI or not MASK.EVEN_KV
        tile_schedules = ClosedFormTileSchedule(
            work, allocate_int32(FORM.STAGES), SCHEDULE, MASK, CUTS, CUTS or dropout is not None
        )
    drops = DropoutSigns(work, dropout) if dropout is not None else NoDropout()
    STAMPED: gl.constexpr = stamped is not None
    stamps = NoStamps()
    if STAMPED:
        stamps = Stamps(stamped, barriers(FORM.STAGES), FORM.STAGES)
    REDUCERS: gl.constexpr = min(FORM.STAGES, 2)  # one for each step in flight
    WORKERS: gl.constexpr = 1 + REDUCERS + STAMPED  # all roles but the consumers
    rows = VarlenLayout(varlen_layout, problem.kv_len, MASK.VARLEN_ROWS)
    shared = allocate_shared(
        q_desc.dtype, FORM, tile_schedules.CLEARS, WORKERS, STAMPED
    )  # all but the producer read tile schedules
    fence_async_shared()
    first = (tile_schedules, stamps, shared, dq_desc, workspace.semaphores, Share(0, REDUCERS))
    second = (tile_schedules, stamps, shared, dq_desc, workspace.semaphores, Share(1, REDUCERS))
    # Gluon wants literals: names for them would turn constants into values, and so does what is added to a list.
    gl.warp_specialize(
        [
            (consume, (tile_schedules, rows, drops, shared, dk_desc, dv_desc, targets, workspace, problem, bound,
                       FORM)),
            (produce, (tile_schedules, rows, stamps, shared, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
                       workspace, problem, SCHEDULE)),
            (reduce, first),
        ]
        + ([(reduce, second)] if REDUCERS > 1 else [])
        + ([(stamp_steps, (tile_schedules, shared, stamps))] if STAMPED else []),
        [1] * WORKERS,
        [FORM.ROLE_REGISTERS] * WORKERS,
    )  # fmt: skip
