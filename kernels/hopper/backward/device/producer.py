"""The producer role: one warp that loads K and V per kv tile, and Q, lse, dO and delta per iteration, by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...shared.device.clear import blind_queries, clear, complete
from ...shared.device.operations import as_longer, begin_load, load_rows
from ...shared.device.step_signals import ROOM, wait_for_signal
from .group import wait_for_group
from .work_ids import announce, take_work_id, wait_until_left


@gluon.jit
def wait_for_room(shared, stamps, it):
    """Waits until iteration ``it - STAGES`` is done and stamped, so that iteration `it` may overwrite its tiles."""
    if it >= shared.STAGES:
        wait_for_signal(shared, ROOM, it, shared.CONSUMERS)
    stamps.wait_until_noted(it)


@gluon.jit
def _clear_keys(tile_schedule, shared, kv, landings):
    """Completes K and V, with zeros for keys that no query sees, see Note [Rows that take no part] in `clear`."""
    hidden = tile_schedule.hidden_keys(kv)
    mbarrier.wait(shared.k_full.index(1), landings & 1)
    clear(shared.k, hidden)
    if shared.TAIL_D > 0:
        clear(shared.k_tail, hidden)
    complete(shared.k_full.index(0))
    mbarrier.wait(shared.v_full.index(1), landings & 1)
    clear(shared.v, hidden)
    complete(shared.v_full.index(0))


@gluon.jit
def _clear_queries(shared, stage, landings):
    """Completes Q and dO of an iteration, in this stage of their rings, with zeros for queries that see no key."""
    mbarrier.wait(shared.q_full.index(shared.STAGES), landings & 1)
    for h in range(shared.PIECES):
        piece = stage * shared.PIECES + h
        hidden = blind_queries(shared.lse.index(piece))
        clear(shared.q.index(piece), hidden)
        if shared.TAIL_D > 0:
            clear(shared.q_tail.index(piece), hidden)
    complete(shared.q_full.index(stage))
    mbarrier.wait(shared.do_full.index(shared.STAGES), landings & 1)
    for h in range(shared.PIECES):
        hidden = blind_queries(shared.lse.index(stage * shared.PIECES + h))
        clear(shared.do.index(stage * shared.PIECES + h), hidden)
    complete(shared.do_full.index(stage))


@gluon.jit
def produce(
    tile_schedules,
    varlen_layout,
    stamps,
    shared,
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    lse_desc,
    delta_desc,
    workspace,
    problem,
    SCHEDULE,
):
    """Runs the producer: takes work ids, announces work items, and fills the rings.

    What a load reads outside of a TMA descriptor's rows and columns, on either side, arrives as zeros.  Q and dO of the
    first iteration of a kv tile are requested during the previous kv tile; K and V once the consumers have released
    those of the previous one.
    """
    BLOCK_Q: gl.constexpr = tile_schedules.work.BLOCK_Q
    BLOCK_KV: gl.constexpr = tile_schedules.work.BLOCK_KV
    TAIL: gl.constexpr = shared.TAIL_D > 0
    ROWS: gl.constexpr = q_desc.block_type.shape[2]  # that a load brings: a q tile, or a piece of it
    LOADS: gl.constexpr = BLOCK_Q // ROWS
    q_ring = as_longer(shared.q, shared.STAGES * LOADS)
    do_ring = as_longer(shared.do, shared.STAGES * LOADS)
    lse_ring = as_longer(shared.lse, shared.STAGES)
    delta_ring = as_longer(shared.delta, shared.STAGES)
    D: gl.constexpr = shared.k.shape[1]
    WIDTH: gl.constexpr = shared.k.dtype.primitive_bitwidth // 8
    K_BYTES: gl.constexpr = BLOCK_KV * (D + shared.TAIL_D) * WIDTH
    V_BYTES: gl.constexpr = BLOCK_KV * shared.v.shape[1] * WIDTH
    Q_BYTES: gl.constexpr = BLOCK_Q * ((D + shared.TAIL_D) * WIDTH + 4)  # with log-sum-exp
    DO_BYTES: gl.constexpr = BLOCK_Q * (shared.v.shape[1] * WIDTH + 4)  # with delta
    facts = tile_schedules.work.facts()
    n = 0  # tile schedules
    done = 0  # steps of the tile schedules before this one
    key_landings = 0  # of tiles with rows that take no part
    query_landings = 0
    work_id = take_work_id(workspace.work_id_ptr)
    while work_id < problem.work_ids:
        position, place_in_launch = SCHEDULE.LAUNCH(
            work_id, problem.batch * tile_schedules.work.q_heads, facts, BLOCK_Q, BLOCK_KV, problem.head_chunk
        )
        tile_schedule = tile_schedules.at(position)
        work = tile_schedule.work
        b = work.batch
        head = work.head
        q_head = work.q_head()
        for part in gl.static_range(SCHEDULE.PARTS):
            kv = SCHEDULE.KV_TILE(place_in_launch, part, facts, BLOCK_Q, BLOCK_KV)
            exists = kv * BLOCK_KV < work.kv_len
            if varlen_layout.VARLEN_ROWS:  # a kv tile without a token has no gradient, in any head of its group
                exists = exists & ((tile_schedule.steps(kv) > 0) | (varlen_layout.count(kv * BLOCK_KV, BLOCK_KV) > 0))
            if exists:
                announce(shared, n, position, kv)
                steps = tile_schedule.steps(kv)
                kv_row = kv * BLOCK_KV - work.first_key()
                ahead = tile_schedule.begin(0, kv)
                q_token = 0
                if varlen_layout.VARLEN_ROWS:
                    kv_row = varlen_layout.token(kv * BLOCK_KV)
                    q_token = varlen_layout.token(tile_schedule.q_tile(ahead) * BLOCK_Q)
                unseen = 0  # 1 where keys of the kv tile take no part
                if tile_schedule.CLEARS:
                    unseen = gl.max(tile_schedule.hidden_keys(kv), 0)
                if steps > 0:
                    stamps.begin(work, kv, work_id)
                for step in range(steps):
                    packed_tile, ahead = tile_schedule.following(ahead, step, step + 1, steps, kv)
                    q = tile_schedule.q_tile(packed_tile)
                    q_row = q * BLOCK_Q - work.first_row()
                    if varlen_layout.VARLEN_ROWS:  # asked for in the step before
                        q_row = q_token
                        q_token = varlen_layout.token(tile_schedule.q_tile(ahead) * BLOCK_Q)
                    row = work.tile_index(q) * BLOCK_Q
                    it = done + step
                    wait_for_room(shared, stamps, it)
                    stage = it % shared.STAGES
                    full = shared.q_full.index(stage)
                    if tile_schedule.CLEARS:
                        full = shared.q_full.index(gl.where(tile_schedule.has_blind(packed_tile), shared.STAGES, stage))
                    mbarrier.expect(full, Q_BYTES)
                    for i in gl.static_range(LOADS):
                        piece = stage * LOADS + i
                        load_rows(q_desc, b, q_head, q_row + i * ROWS, full, q_ring.index(piece))
                        if TAIL:
                            load_rows(q_desc, b, q_head, q_row + i * ROWS, full, shared.q_tail.index(piece), D)
                    begin_load(lse_desc, [row], full, lse_ring.index(stage))
                    full = shared.do_full.index(stage)
                    tile_schedule.put_packed_tile(packed_tile, stage, full)
                    if tile_schedule.CLEARS:
                        full = shared.do_full.index(
                            gl.where(tile_schedule.has_blind(packed_tile), shared.STAGES, stage)
                        )
                    mbarrier.expect(full, DO_BYTES)
                    for i in gl.static_range(LOADS):
                        load_rows(do_desc, b, q_head, q_row + i * ROWS, full, do_ring.index(stage * LOADS + i))
                    begin_load(delta_desc, [row], full, delta_ring.index(stage))
                    if step == 0:
                        mbarrier.wait(shared.kv_empty.index(0), (n & 1) ^ 1)
                        full = shared.k_full.index(unseen)
                        mbarrier.expect(full, K_BYTES)
                        load_rows(k_desc, b, head, kv_row, full, shared.k)
                        if TAIL:
                            load_rows(k_desc, b, head, kv_row, full, shared.k_tail, D)
                        full = shared.v_full.index(unseen)
                        mbarrier.expect(full, V_BYTES)
                        load_rows(v_desc, b, head, kv_row, full, shared.v)
                    if tile_schedule.CLEARS:
                        if (step == 0) & (unseen != 0):
                            _clear_keys(tile_schedule, shared, kv, key_landings)
                            key_landings += 1
                        if tile_schedule.has_blind(packed_tile):
                            _clear_queries(shared, stage, query_landings)
                            query_landings += 1
                if steps == 0:  # K and V are announced without data
                    mbarrier.wait(shared.kv_empty.index(0), (n & 1) ^ 1)
                    mbarrier.arrive(shared.k_full.index(0), count=1)
                    mbarrier.arrive(shared.v_full.index(0), count=1)
                done += steps
                n += 1
                if work.GROUP > 1:
                    wait_until_left(shared, n)  # the tile schedule before has passed the group's barrier
                    wait_for_group(work, kv, workspace.group_semaphores, shared.group_barrier.index(0))
        work_id = problem.work_ids  # of CTAs that need each other none may take two
        if not SCHEDULE.CO_RESIDENT:
            work_id = take_work_id(workspace.work_id_ptr)
    announce(shared, n, -1, -1)
    for it in range(done, done + shared.STAGES):  # consumers speak of every step, so somebody has to listen
        wait_for_room(shared, stamps, it)
