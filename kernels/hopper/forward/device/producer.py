"""The producer role: one warp that takes q tiles from the work list and loads their Q, K and V by TMA.

Note [Drawing tiles]
    The first tile of CTA c is the c-th of the list; after that, a CTA takes the first tile that nobody has, by an
    atomic add to a counter.  The results of a tile depend only on its place in the list, not on the CTA that computes
    it.  CTAs wait for nobody, so any number of them may run at the same time.

    The counter lies in memory that the call allocated, and `prepare`, launched just before in the same stream, sets it
    to zero.  So every call has a counter of its own that begins at zero, even after an aborted call, with calls in
    other streams, and in the replay of a CUDA graph.  The main kernel may start while `prepare` runs (programmatic
    dependent launch): every CTA waits for the end of `prepare` before it draws, and every CTA draws at least once, so
    what follows the main kernel in its stream follows `prepare` as well.  The operands, which the main kernel reads
    before that wait, were written before `prepare` began, since `prepare` itself is an ordinary launch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from ...shared.device.clear import clear, complete, keys_behind, unseen_keys
from ...shared.device.operations import load_rows, role_barrier
from .listed import has_unseen, kv_of, put_packed_tile
from .shared_memory import document_fact, fact_stages, fact_words
from .tile_work import ROWS


@gluon.jit
def draw(counter_ptr):
    """Takes the index of the CTA's next q tile in the work list from an atomic counter; past its end, none is left."""
    gdc_wait()  # for `prepare`
    return gl.atomic_add(counter_ptr, 1, sem="relaxed") + gl.num_programs(0)


@gluon.jit
def announce(work, data, shared, tiles, b, head, first_block, first, count, document):
    """Writes to shared memory what the consumers need to know of the CTA's tiles-th q tile, before its Q is announced.

    b, head: batch element and query head; first_block: its first row block; first: its first kv tile, or, if the mask
    is data, its first packed tile id; count: one more than its last kv tile, or, if the mask is data, the number of
    packed tile ids; 0 after the last q tile.  With a band, the four bounds of every consumer's tile schedule follow;
    the producer has time to compute them before there is room for Q.  document: its first token, first row and signed
    length, see `documents.Documents.entry`.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, layout)
    place = tiles % fact_stages(shared.Q_STAGES, shared.PACKED) * fact_words(work.CONSUMERS, shared.PACKED)
    shared.facts.index(place).store(zero + b)
    shared.facts.index(place + 1).store(zero + head)
    shared.facts.index(place + 2).store(zero + first_block)
    shared.facts.index(place + 3).store(zero + first)
    shared.facts.index(place + 4).store(zero + count)
    if not data.GIVEN:
        for i in gl.static_range(work.CONSUMERS):
            tile_schedule = work.tile_schedule(first_block + i, first, count)
            for j in gl.static_range(4):
                shared.facts.index(place + 5 + 4 * i + j).store(zero + tile_schedule[j])
        if shared.PACKED:
            for i in gl.static_range(3):
                shared.facts.index(place + document_fact(work.CONSUMERS) + i).store(zero + document[i])
    role_barrier()


@gluon.jit
def wait_for_room(empty, it, STAGES: gl.constexpr):
    """Waits until all consumers have released the stage of the it-th tile of a ring, and returns the stage."""
    stage = it % STAGES
    mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
    return stage


@gluon.jit
def load_keys(shared, desc, b, head, row, it, BYTES: gl.constexpr):
    stage = wait_for_room(shared.k_empty, it, shared.STAGES)
    full = shared.k_full.index(stage)
    mbarrier.expect(full, BYTES)
    load_rows(desc, b, head, row, full, shared.k.index(stage))
    if shared.TAIL_D > 0:
        load_rows(desc, b, head, row, full, shared.k_tail.index(stage), shared.k.shape[2])


@gluon.jit
def load_values(shared, desc, b, head, row, it, BYTES: gl.constexpr):
    stage = wait_for_room(shared.v_empty, it, shared.STAGES)
    full = shared.v_full.index(stage)
    mbarrier.expect(full, BYTES)
    load_rows(desc, b, head, row, full, shared.v.index(stage))


@gluon.jit
def load_seen_values(work, data, shared, desc, b, head, packed_tile, row, it, landings, BYTES: gl.constexpr):
    """Loads V of a packed tile id's kv tile, from `row` on, with zeros for keys that no query sees.

    See Note [Rows that take no part] in `shared.device.clear`.  head: the query head; it: the number of the kv tile in
    the CTA; landings: how many V tiles have been cleared so far.  Returns the new value of `landings`.
    """
    stage = wait_for_room(shared.v_empty, it, shared.STAGES)
    full = shared.v_full.index(gl.where(has_unseen(packed_tile), shared.STAGES, stage))
    mbarrier.expect(full, BYTES)
    load_rows(desc, b, head // work.group, row, full, shared.v.index(stage))
    if has_unseen(packed_tile):
        hidden = unseen_keys(
            data.arguments.keys_seen_ptr, data.table(b, head), kv_of(packed_tile), work.kv_len, work.BLOCK_KV
        )
        mbarrier.wait(full, landings & 1)
        clear(shared.v.index(stage), hidden)
        complete(shared.v_full.index(stage))
        landings += 1
    return landings


@gluon.jit
def load_document_values(work, shared, desc, b, head, kv, token, it, landings, BYTES: gl.constexpr):
    """Loads V of kv tile `kv` of a document, with zeros for keys after its end; returns `landings`.

    work: that of the document; token: its first token; the others are those of `load_seen_values`, but head: a kv head.
    """
    stage = wait_for_room(shared.v_empty, it, shared.STAGES)
    ends = (kv + 1) * work.BLOCK_KV > work.kv_len
    full = shared.v_full.index(gl.where(ends, shared.STAGES, stage))
    mbarrier.expect(full, BYTES)
    load_rows(desc, b, head, token + kv * work.BLOCK_KV, full, shared.v.index(stage))
    if ends:
        mbarrier.wait(full, landings & 1)
        clear(shared.v.index(stage), keys_behind(kv, work.kv_len, work.BLOCK_KV))
        complete(shared.v_full.index(stage))
        landings += 1
    return landings


@gluon.jit
def load_queries(work, shared, desc, b, head, first_row, stage, BYTES: gl.constexpr):
    """Loads the row blocks of a q tile; first_row: their first row in the descriptor."""
    full = shared.q_full.index(stage)
    mbarrier.expect(full, BYTES)
    for i in gl.static_range(work.CONSUMERS):
        tile = stage * work.CONSUMERS + i
        row = first_row + i * ROWS
        load_rows(desc, b, head, row, full, shared.q.index(tile))
        if shared.TAIL_D > 0:
            load_rows(desc, b, head, row, full, shared.q_tail.index(tile), shared.q.shape[2])


@gluon.jit
def produce(work, data, documents, shared, q_desc, k_desc, v_desc, counter_ptr):
    """Runs the producer: fills the rings of Q, K and V in the order of use, K of the next step before V of this one.

    Rows and columns outside a descriptor, also before its first, arrive as zeros.  After the last q tile it announces
    one without kv tiles and without a Q, at which the consumers end.
    """
    D: gl.constexpr = shared.k.shape[2] + shared.TAIL_D
    WIDTH: gl.constexpr = shared.k.dtype.primitive_bitwidth // 8
    Q_BYTES: gl.constexpr = work.CONSUMERS * ROWS * D * WIDTH
    K_BYTES: gl.constexpr = work.BLOCK_KV * D * WIDTH
    V_BYTES: gl.constexpr = work.BLOCK_KV * shared.v.shape[2] * WIDTH
    done = 0  # steps of the tiles before this one
    tiles = 0
    landings = 0
    place = gl.program_id(0)
    q_tiles = documents.q_tiles(work)
    packed_tiles_ptr, steps, packed_tile, second = first_packed_tiles(work, data, place)
    entry = document_entry(work, documents, place, q_tiles)
    while place < work.count(q_tiles):
        b, head, _q_tile, first_block = work.tile(place, q_tiles)
        kv_head = head // work.group
        local, token, document = work, 0, (0, 0, 0)
        first_row = -work.first_row()  # the descriptors' row of query 0
        if documents.GIVEN:
            first_block, token, row_of_document, length, b = entry
            local, document = documents.within(work, length), (token, row_of_document, length)
            first_row = token
        if data.GIVEN:
            b = data.element(b)
            ahead = gl.where(steps > 1, second, 0)
            row = first_row_of(work, packed_tile)
            put_packed_tile(shared, done, ahead)
            load_keys(shared, k_desc, b, kv_head, row, done, K_BYTES)
            later_row = first_row_of(work, ahead)
            place = draw(counter_ptr)
            announce(work, data, shared, tiles, b, head, first_block, packed_tile, steps, document)
        else:
            first, end = local.kv_tiles(first_block)
            first_key = token if documents.GIVEN else -work.first_key()
            last_row = (end - 1) * work.BLOCK_KV + first_key  # of the kv tile that is scheduled first
            steps = end - first
            load_keys(shared, k_desc, b, kv_head, last_row, done, K_BYTES)
            place = draw(counter_ptr)  # here, where the consumers have a step to go before there is room for Q
            announce(local, data, shared, tiles, b, head, first_block, first, end, document)
        stage = wait_for_room(shared.q_empty, tiles, shared.Q_STAGES)
        load_queries(work, shared, q_desc, b, head, first_row + first_block * ROWS, stage, Q_BYTES)
        if data.GIVEN:
            for step in range(1, steps):
                before = packed_tile
                v_row = row
                packed_tile = ahead
                row = later_row  # asked for in the step before
                ahead = gl.load(packed_tiles_ptr + (step + 1), mask=step + 1 < steps, other=0)
                put_packed_tile(shared, done + step, ahead)
                later_row = first_row_of(work, ahead)
                load_keys(shared, k_desc, b, kv_head, row, done + step, K_BYTES)
                landings = load_seen_values(
                    work, data, shared, v_desc, b, head, before, v_row, done + step - 1, landings, V_BYTES
                )
            done += steps
            last = packed_tile
            packed_tiles_ptr, steps, packed_tile, second = first_packed_tiles(
                work, data, place
            )  # they come while there is no room for V
            landings = load_seen_values(work, data, shared, v_desc, b, head, last, row, done - 1, landings, V_BYTES)
        else:
            for step in range(1, steps):
                k_row = last_row - step * work.BLOCK_KV
                load_keys(shared, k_desc, b, kv_head, k_row, done + step, K_BYTES)
                if documents.GIVEN:
                    landings = load_document_values(
                        local, shared, v_desc, b, kv_head, end - step, token, done + step - 1, landings, V_BYTES
                    )
                else:
                    load_values(shared, v_desc, b, kv_head, k_row + work.BLOCK_KV, done + step - 1, V_BYTES)
            done += steps
            if documents.GIVEN:
                entry = document_entry(work, documents, place, q_tiles)  # it comes while there is no room for V
                landings = load_document_values(
                    local, shared, v_desc, b, kv_head, first, token, done - 1, landings, V_BYTES
                )
            else:
                load_values(shared, v_desc, b, kv_head, last_row - (steps - 1) * work.BLOCK_KV, done - 1, V_BYTES)
        tiles += 1
    announce(work, data, shared, tiles, 0, 0, 0, 0, 0, (0, 0, 0))
    stage = wait_for_room(shared.q_empty, tiles, shared.Q_STAGES)
    mbarrier.arrive(shared.q_full.index(stage), count=1)


@gluon.jit
def first_packed_tiles(work, data, place):
    """Returns (pointer, number of packed tile ids, first packed tile id, second packed tile id) of the q tile at
    `place` in the work list.

    A packed tile id encodes one kv tile that the q tile visits (see `forward_packed_tiles` of
    `schedule/table_tile_schedule.py`).  If all keys fit in one kv tile, the first packed tile id is returned twice.  A
    `place` past the end gives the last tile.  If `data.GIVEN` is false, all four values are `place`, and nothing may
    read them.
    """
    if data.GIVEN:
        q_tiles = work.q_tiles()
        last = gl.maximum(work.count(q_tiles) - 1, 0)  # without a tile, what is read is not used
        b, head, q_tile, _first_block = work.tile(gl.minimum(place, last), q_tiles)
        packed_tiles_ptr, steps = data.packed_tiles_of(work, data.element(b), head, q_tile)
        more = gl.where(work.kv_len > work.BLOCK_KV, 1, 0)
        return packed_tiles_ptr, steps, gl.load(packed_tiles_ptr), gl.load(packed_tiles_ptr + more)
    else:
        return place, place, place, place


@gluon.jit
def document_entry(work, documents, place, q_tiles):
    """Returns `Documents.entry` of the q tile at `place` in the work list, or of the last one past the end."""
    some = gl.maximum(q_tiles, 1)  # without a token there is no q tile, and what is read is not used
    _b, _head, q_tile, _first_block = work.tile(gl.minimum(place, work.count(some) - 1), some)
    return documents.entry(q_tile)


@gluon.jit
def first_row_of(work, packed_tile):
    """Returns the first row of a packed tile id's kv tile, as a row coordinate of the descriptors of K and V."""
    return kv_of(packed_tile) * work.BLOCK_KV - work.first_key()
