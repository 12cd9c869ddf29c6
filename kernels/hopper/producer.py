"""The producer: one warp that brings K and V once per kv tile, and Q, lse, dO and delta once per step, by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .clear import blind_queries, clear, complete
from .group import wait_for_group
from .operations import begin_load, load_rows


@gluon.jit
def wait_for_room(shared, stamps, it):
    """Wait until step ``it - STAGES`` is done and stamped: then step `it` has room for its tiles, in the Q ring too."""
    mbarrier.wait(shared.step_done.index(it % shared.STAGES), ((it // shared.STAGES) & 1) ^ 1)
    stamps.wait_until_noted(it)


@gluon.jit
def _clear_keys(walk, shared, kv, landings):
    """Announce K and V, with zeros for keys that no query sees, see Note [Rows that take no part] in `clear`."""
    hidden = walk.hidden_keys(kv)
    mbarrier.wait(shared.k_full.index(1), landings & 1)
    clear(shared.k, hidden)
    if shared.TAIL_D > 0:
        clear(shared.k_tail, hidden)
    complete(shared.k_full.index(0))
    mbarrier.wait(shared.v_full.index(1), landings & 1)
    clear(shared.v, hidden)
    complete(shared.v_full.index(0))


@gluon.jit
def _clear_queries(shared, slot, do_slot, landings):
    """Announce Q and dO of a step, in these slots of their rings, with zeros for queries that see no key."""
    mbarrier.wait(shared.q_full.index(shared.Q_STAGES), landings & 1)
    for h in range(shared.HALVES):
        piece = slot * shared.HALVES + h
        hidden = blind_queries(shared.lse.index(piece))
        clear(shared.q.index(piece), hidden)
        if shared.TAIL_D > 0:
            clear(shared.q_tail.index(piece), hidden)
    complete(shared.q_full.index(slot))
    mbarrier.wait(shared.do_full.index(shared.STAGES), landings & 1)
    for h in range(shared.HALVES):
        hidden = blind_queries(shared.lse.index(slot * shared.HALVES + h))
        clear(shared.do.index(do_slot * shared.HALVES + h), hidden)
    complete(shared.do_full.index(do_slot))


@gluon.jit
def produce(
    walk, places, stamps, shared, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, group_semaphores,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Fill the rings.  Rows and columns outside a descriptor, before its first too, arrive as zeros.

    With AHEAD the consumers wait for one Q tile past the last; it is announced without data.
    """
    work = walk.work
    TAIL: gl.constexpr = shared.TAIL_D > 0
    HALVES: gl.constexpr = shared.HALVES
    ROWS: gl.constexpr = work.BLOCK_Q // HALVES
    D: gl.constexpr = shared.k.shape[1]
    WIDTH: gl.constexpr = shared.k.dtype.primitive_bitwidth // 8
    K_BYTES: gl.constexpr = work.BLOCK_KV * (D + shared.TAIL_D) * WIDTH
    V_BYTES: gl.constexpr = work.BLOCK_KV * shared.v.shape[1] * WIDTH
    Q_BYTES: gl.constexpr = work.BLOCK_Q * ((D + shared.TAIL_D) * WIDTH + 4)  # with log-sum-exp
    DO_BYTES: gl.constexpr = work.BLOCK_Q * (shared.v.shape[1] * WIDTH + 4)  # with delta
    b = work.batch
    head = work.head
    q_head = work.q_head()
    first_slot = 0  # of the Q ring, counted on
    done = 0  # steps of the parts before this one
    key_landings = 0  # of tiles with rows that take no part
    query_landings = 0
    for part in gl.static_range(work.PARTS):
        kv = work.kv_tile(part)
        kv_row = kv * work.BLOCK_KV - work.first_key()
        ahead = walk.begin(0, kv)
        q_token = 0
        if places.PLACED:
            kv_row = places.token(kv * work.BLOCK_KV)
            q_token = places.token(walk.q_tile(ahead) * work.BLOCK_Q)
        steps = walk.steps(kv)
        unseen = 0  # 1 where keys of the kv tile take no part
        if walk.CLEARS:
            unseen = gl.max(walk.hidden_keys(kv), 0)
        if steps > 0:
            # The consumers leave K and V at the end of every part: zeros of an empty one go out through them as well.
            gl.static_assert(part < 2)  # of three, the parity would not tell none from two
            mbarrier.wait(shared.kv_empty.index(0), (part & 1) ^ 1)
            full = shared.k_full.index(unseen)
            mbarrier.expect(full, K_BYTES)
            load_rows(k_desc, b, head, kv_row, full, shared.k)
            if TAIL:
                load_rows(k_desc, b, head, kv_row, full, shared.k_tail, D)
        for step in range(steps):
            word, ahead = walk.following(ahead, step, step + 1, steps, kv)
            q = walk.q_tile(word)
            q_row = q * work.BLOCK_Q - work.first_row()
            if places.PLACED:  # asked for in the step before
                q_row = q_token
                q_token = places.token(walk.q_tile(ahead) * work.BLOCK_Q)
            row = work.tile_index(q) * work.BLOCK_Q
            it = done + step
            wait_for_room(shared, stamps, it)
            slot = (first_slot + step) % shared.Q_STAGES
            full = shared.q_full.index(slot)
            if walk.CLEARS:
                full = shared.q_full.index(gl.where(walk.has_blind(word), shared.Q_STAGES, slot))
            mbarrier.expect(full, Q_BYTES)
            for h in gl.static_range(HALVES):
                piece = slot * HALVES + h
                load_rows(q_desc, b, q_head, q_row + h * ROWS, full, shared.q.index(piece))
                if TAIL:
                    load_rows(q_desc, b, q_head, q_row + h * ROWS, full, shared.q_tail.index(piece), D)
                begin_load(lse_desc, [row + h * ROWS], full, shared.lse.index(piece))
            if step == 0:  # V is needed one matmul later than K and the first Q
                full = shared.v_full.index(unseen)
                mbarrier.expect(full, V_BYTES)
                load_rows(v_desc, b, head, kv_row, full, shared.v)
            do_slot = it % shared.STAGES
            full = shared.do_full.index(do_slot)
            walk.tell(word, do_slot, full)
            if walk.CLEARS:
                full = shared.do_full.index(gl.where(walk.has_blind(word), shared.STAGES, do_slot))
            mbarrier.expect(full, DO_BYTES)
            for h in gl.static_range(HALVES):
                piece = do_slot * HALVES + h
                load_rows(do_desc, b, q_head, q_row + h * ROWS, full, shared.do.index(piece))
                begin_load(delta_desc, [row + h * ROWS], full, shared.delta.index(piece))
            if walk.CLEARS:
                if (step == 0) & (unseen != 0):
                    _clear_keys(walk, shared, kv, key_landings)
                    key_landings += 1
                if walk.has_blind(word):
                    _clear_queries(shared, slot, do_slot, query_landings)
                    query_landings += 1
        first_slot += steps
        done += steps
        if AHEAD:
            if steps > 0:
                wait_for_room(shared, stamps, done)
                mbarrier.arrive(shared.q_full.index(first_slot % shared.Q_STAGES), count=1)
                first_slot += 1
        if work.GROUP > 1:
            if kv * work.BLOCK_KV < work.kv_len:
                if part > 0:  # consumers have had the turn of the part before
                    mbarrier.wait(shared.kv_empty.index(0), (part & 1) ^ 1)
                wait_for_group(work, kv, group_semaphores, shared.turn.index(0))
