"""The kernel: a CTA splits into its roles, which work on one ticket after the other."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...shared.device.dropout import AllKept, Dropout
from ...shared.device.places import Places, Target
from ...shared.device.told import allocate_words
from ...shared.device.work import Work, allocate_shared, barriers, pieces
from .closed_form import ClosedForm
from .consumer import consume
from .producer import produce
from .reducer import reduce
from .stamps import NoStamps, Stamps, record
from .table_walk import TableWalk, allocate_told


@gluon.jit
def hopper_backward(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, dq_desc, lse_desc, delta_desc, semaphores, ticket_ptr,
    group_sums, group_semaphores, tickets, batch, q_heads, q_len, kv_len, lo, hi, section, scale, scale_log2,
    visits, words, q_codes, kv_codes, keys_seen, dense, table_b, table_h, dense_b, dense_h, dense_i,
    dense_j, seed, threshold, rescale, place_ptr, count_ptr, dk_ptr, dk_h, dk_row, dk_dim, dv_ptr, dv_h, dv_row, dv_dim,
    stamps_ptr, stamped_heads,
    LAUNCH: gl.constexpr, KV_TILE: gl.constexpr, VISITS: gl.constexpr, Q_TILE: gl.constexpr, RANK: gl.constexpr,
    Q_RANGE: gl.constexpr, SEEN_ROWS: gl.constexpr, SEEN_KEYS: gl.constexpr, PARTS: gl.constexpr,
    CO_RESIDENT: gl.constexpr, GROUP: gl.constexpr, HAS_LO: gl.constexpr, HAS_HI: gl.constexpr, EVEN_KV: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
    BLOCK_D: gl.constexpr, TAIL_D: gl.constexpr, BLOCK_DV: gl.constexpr, STAGES: gl.constexpr,
    DQ_STAGES: gl.constexpr, STEP: gl.constexpr, AHEAD: gl.constexpr, LEFT_IN_REGISTERS: gl.constexpr,
    ROLE_REGISTERS: gl.constexpr, HAS_CODES: gl.constexpr, HAS_DENSE: gl.constexpr, DROPOUT: gl.constexpr,
    PLACED: gl.constexpr, STAMPED: gl.constexpr,
):  # fmt: skip
    """dk, dv (final) and dq (fp32, unscaled) of an attention backward.

    q, do: [batch, q_heads, q_len, D or DV]; k, v, dk, dv: [batch, q_heads // GROUP, kv_len, D or DV], fp16 or bf16,
    descriptors with blocks of 64 columns of one tile; D is up to BLOCK_D + TAIL_D.  q and do hold only the rows that
    see a key, k and v only the keys that a row sees: all others arrive as zeros.  dq: fp32 [batch *
    q_heads * n_q * BLOCK_Q * (BLOCK_D + TAIL_D) / DQ_ROW, DQ_ROW], in the order of `in_fragments`; lse (base 2) and
    delta: fp32 [batch * q_heads * n_q * BLOCK_Q], with ``lse = inf`` and ``delta = 0`` in rows that see no key and past
    q_len.
    semaphores: int32 [batch * q_heads * n_q], zeros; ticket_ptr: int32 [1], zero; tickets: how
    many there are, for any number of CTAs, see `tickets`; group_sums, group_semaphores: see
    `group.add_to_group`.  `visits` to `dense_j` are given with HAS_CODES or HAS_DENSE only, see `table_walk`; seed,
    threshold and rescale with DROPOUT only, see `dropout`.

    With PLACED, above 0, the mask is one of rows: q_len and kv_len count rows, dq, lse and delta have rows, and the
    other tensors have tokens; see `places`, also for the arguments from place_ptr on, which are given then only.
    With STAMPED the kernel writes down when it does what, see `stamps`.
    """
    gdc_wait()  # for `prepare`
    gdc_launch_dependents()  # `finish` may begin once all CTAs have: not before, it reads what `prepare` resets
    n_q = (q_len + BLOCK_Q - 1) // BLOCK_Q
    nobody = gl.to_tensor(0)
    work = Work(
        nobody, nobody, nobody, q_heads, q_len, kv_len, lo, hi, n_q, SEEN_ROWS, SEEN_KEYS, GROUP, BLOCK_Q, BLOCK_KV
    )
    if HAS_CODES or HAS_DENSE:
        told_words, told_codes = allocate_told(BLOCK_Q, STAGES, pieces(STEP), HAS_CODES)
        walks = TableWalk(
            work, visits, words, q_codes, kv_codes, keys_seen, dense, table_b, table_h,
            dense_b, dense_h, dense_i, dense_j, told_words, told_codes, HAS_LO, HAS_HI, HAS_CODES, HAS_DENSE,
        )  # fmt: skip
    else:
        CUTS: gl.constexpr = HAS_LO or HAS_HI or not EVEN_KV
        walks = ClosedForm(
            work, allocate_words(STAGES), VISITS, Q_TILE, RANK, Q_RANGE, HAS_LO, HAS_HI, EVEN_KV, CUTS, CUTS or DROPOUT,
        )  # fmt: skip
    drops = Dropout(work, seed, threshold, rescale) if DROPOUT else AllKept()
    stamps = NoStamps()
    if STAMPED:
        stamps = Stamps(stamps_ptr, stamped_heads, barriers(STAGES), STAGES)
    READERS: gl.constexpr = 1 + min(STAGES, 2) + STAMPED  # of the ring of walks: all roles but the producer
    places = Places(place_ptr, count_ptr, kv_len, PLACED)
    dk_target = Target(dk_ptr, dk_h, dk_row, dk_dim)
    dv_target = Target(dv_ptr, dv_h, dv_row, dv_dim)
    shared = allocate_shared(
        q_desc.dtype, BLOCK_Q, BLOCK_KV, BLOCK_D, TAIL_D, BLOCK_DV, STAGES, DQ_STAGES, STEP, GROUP,
        walks.CLEARS, READERS, STAMPED,
    )  # fmt: skip
    fence_async_shared()
    WARPS: gl.constexpr = gl.num_warps()
    # A reducer for each step in flight.  Gluon wants both lists literal: names for their entries would turn
    # constants into values.
    if STAGES == 1 and not STAMPED:
        gl.warp_specialize(
            [
                (consume, (walks, places, drops, shared, dk_desc, dv_desc, dk_target, dv_target, group_sums,
                           group_semaphores, scale, scale_log2, WARPS, STEP, AHEAD, LEFT_IN_REGISTERS)),
                (produce, (walks, places, stamps, shared, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
                           group_semaphores, ticket_ptr, tickets, batch, section, LAUNCH, KV_TILE, PARTS,
                           CO_RESIDENT, WARPS)),
                (reduce, (walks, stamps, shared, dq_desc, semaphores, 0, 1, WARPS)),
            ],
            [1, 1],
            [ROLE_REGISTERS, ROLE_REGISTERS],
        )  # fmt: skip
    elif not STAMPED:
        gl.warp_specialize(
            [
                (consume, (walks, places, drops, shared, dk_desc, dv_desc, dk_target, dv_target, group_sums,
                           group_semaphores, scale, scale_log2, WARPS, STEP, AHEAD, LEFT_IN_REGISTERS)),
                (produce, (walks, places, stamps, shared, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
                           group_semaphores, ticket_ptr, tickets, batch, section, LAUNCH, KV_TILE, PARTS,
                           CO_RESIDENT, WARPS)),
                (reduce, (walks, stamps, shared, dq_desc, semaphores, 0, 2, WARPS)),
                (reduce, (walks, stamps, shared, dq_desc, semaphores, 1, 2, WARPS)),
            ],
            [1, 1, 1],
            [ROLE_REGISTERS, ROLE_REGISTERS, ROLE_REGISTERS],
        )  # fmt: skip
    elif STAGES == 1:
        gl.warp_specialize(
            [
                (consume, (walks, places, drops, shared, dk_desc, dv_desc, dk_target, dv_target, group_sums,
                           group_semaphores, scale, scale_log2, WARPS, STEP, AHEAD, LEFT_IN_REGISTERS)),
                (produce, (walks, places, stamps, shared, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
                           group_semaphores, ticket_ptr, tickets, batch, section, LAUNCH, KV_TILE, PARTS,
                           CO_RESIDENT, WARPS)),
                (reduce, (walks, stamps, shared, dq_desc, semaphores, 0, 1, WARPS)),
                (record, (walks, shared, stamps, WARPS)),
            ],
            [1, 1, 1],
            [ROLE_REGISTERS, ROLE_REGISTERS, ROLE_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (walks, places, drops, shared, dk_desc, dv_desc, dk_target, dv_target, group_sums,
                           group_semaphores, scale, scale_log2, WARPS, STEP, AHEAD, LEFT_IN_REGISTERS)),
                (produce, (walks, places, stamps, shared, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
                           group_semaphores, ticket_ptr, tickets, batch, section, LAUNCH, KV_TILE, PARTS,
                           CO_RESIDENT, WARPS)),
                (reduce, (walks, stamps, shared, dq_desc, semaphores, 0, 2, WARPS)),
                (reduce, (walks, stamps, shared, dq_desc, semaphores, 1, 2, WARPS)),
                (record, (walks, shared, stamps, WARPS)),
            ],
            [1, 1, 1, 1],
            [ROLE_REGISTERS, ROLE_REGISTERS, ROLE_REGISTERS, ROLE_REGISTERS],
        )  # fmt: skip
