"""The consumer role: a warpgroup that computes one row block of every q tile of its CTA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ...shared.device.operations import role_barrier, store_rows, wait_until_read
from ...shared.device.steps import accumulator_layout
from ...shared.device.varlen_layout import store_tokens
from .half_tile import half_tile_step
from .listed import FULL, PARTIAL, SKIP, kv_of, read_packed_tile, use_of
from .shared_memory import document_fact, fact_stages, fact_words
from .sinks import load_sinks, with_sinks
from .steps import LOWEST, as_left, first_step, last_product, log2, next_step, release, scaled, skip, wait_for
from .sums import no_sums, sums_of
from .tile_work import ROWS, leaves_out


@gluon.jit
def announced(work, shared, tiles, FACT: gl.constexpr):
    """Reads one number that the producer has announced about a q tile of the CTA, see `producer.announce`.

    tiles: the index of the q tile among those of this CTA; FACT: the index of the number.  The Q of this tile must have
    arrived.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = tiles % fact_stages(shared.Q_STAGES, shared.PACKED) * fact_words(work.CONSUMERS, shared.PACKED)
    return gl.max(shared.facts.index(place + FACT).load(layout), 0)


@gluon.jit
def consume(work, data, documents, drops, shared, out_desc, target, lse_ptr, score, sinks, ME: gl.constexpr):
    """Runs a consumer: computes out and log-sum-exp of the ME-th row block of every q tile of the CTA.

    A row block visits its kv tiles from the last to the first.  The kv tiles that only other row blocks of the q tile
    need are released unread.
    """
    BLOCK_KV: gl.constexpr = work.BLOCK_KV
    BLOCK_DV: gl.constexpr = shared.v.shape[2]
    layout: gl.constexpr = accumulator_layout(ROWS, BLOCK_KV, 4)
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    zero = gl.zeros([ROWS, BLOCK_KV], gl.float32, layout)
    seed = drops.seed()
    it = 0  # steps of the CTA so far
    tiles = 0
    q_stage = wait_for(shared.q_full, 0, shared.Q_STAGES)
    count = announced(work, shared, tiles, 4)
    while count > 0:
        b = announced(work, shared, tiles, 0)
        head = announced(work, shared, tiles, 1)
        block = announced(work, shared, tiles, 2) + ME
        first = announced(work, shared, tiles, 3)
        q_tile = q_stage * work.CONSUMERS + ME
        first_row, local = 0, work
        if documents.GIVEN:
            local = documents.within(work, announced(work, shared, tiles, document_fact(work.CONSUMERS) + 2))
            if drops.GIVEN:
                first_row = announced(work, shared, tiles, document_fact(work.CONSUMERS) + 1)
        exists = True
        if not data.GIVEN:
            bounds = tile_schedule_of(work, shared, tiles, ME)
            for _ in range(count - bounds[3]):
                skip(shared, it)
                it += 1
            if leaves_out(work.CONSUMERS):
                exists = bounds[0] < bounds[3]
        if exists:
            rows = block * ROWS + gl.arange(0, ROWS, row_layout)
            m = gl.full([ROWS], 0.0 if score.FIXED_BASE else LOWEST, gl.float32, row_layout)
            total = no_sums(score, row_layout)
            acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, accumulator_layout(ROWS, BLOCK_DV, 4))
            here = (b, head, block, rows, q_tile, seed, first_row)
            if data.GIVEN:
                acc, m, total = visit_packed_tiles(
                    local, data, drops, shared, score, zero, here, it, first, count, acc, m, total, ME
                )
                it += count
            else:
                p, acc, m, total, it = tile_schedule_band(
                    local, data, drops, shared, score, zero, here, it, bounds, acc, m, total
                )
            if not shared.OUT_IN_Q:
                release(shared.q_empty.index(q_stage))
            if sinks is not None:
                sink = load_sinks(sinks, b, head, rows, local.q_len)
            if not data.GIVEN:
                stage, acc, total = last_product(local, drops, shared, score, here, bounds[0], it - 1, p, acc, total)
            total = sums_of(score, total, row_layout)
            if sinks is not None:
                m, total, shrink = with_sinks(sink, m, total)
            token = 0
            if documents.GIVEN:  # read here, where registers are free again
                token = announced(work, shared, tiles, document_fact(work.CONSUMERS))
                first_row = announced(work, shared, tiles, document_fact(work.CONSUMERS) + 1)
            lse_of_head = lse_ptr + (b * work.q_heads + head).to(gl.int64) * work.q_len + first_row
            store_logsumexp(lse_of_head, rows, local.q_len, m, total)
            share = gl.where(total == 0, 0.0, 1.0 / total)
            if sinks is not None:
                share = share * shrink
            if drops.GIVEN:
                share = share * drops.arguments.rescale
            if not data.GIVEN:
                acc = warpgroup_mma_wait(0, deps=(acc,))
                release(shared.v_empty.index(stage))
                for _ in range(bounds[0] - first):
                    skip(shared, it)
                    it += 1
            share = gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, acc.type.layout)), 1)
            acc = acc * share
            if work.HAS_LO or work.HAS_HI or data.GIVEN:
                # a row without keys has zero times values that others see, which may be NaN
                acc = gl.where(share == 0.0, 0.0, acc)
            store_out(shared, out_desc, target, b, head, block * ROWS, token, local.q_len, acc, ME)
        else:
            release(shared.q_empty.index(q_stage))
        tiles += 1
        q_stage = wait_for(shared.q_full, tiles, shared.Q_STAGES)
        count = announced(work, shared, tiles, 4)
    wait_until_read()


@gluon.jit
def tile_schedule_of(work, shared, tiles, ME: gl.constexpr):
    """Reads (first, full_first, full_end, end) of the kv tiles of the ME-th row block of the CTA's tiles-th q tile.

    The producer has announced them; `TileWork.tile_schedule` defines them.
    """
    first = announced(work, shared, tiles, 5 + 4 * ME)
    full_first = announced(work, shared, tiles, 6 + 4 * ME)
    full_end = announced(work, shared, tiles, 7 + 4 * ME)
    end = announced(work, shared, tiles, 8 + 4 * ME)
    return first, full_first, full_end, end


@gluon.jit
def tile_schedule_band(work, data, drops, shared, score, zero, here, it, bounds, acc, m, total):
    """Visits the kv tiles of a row block under a band; returns (P of the last kv tile, acc, m, total, it).

    The product P V of the last kv tile is left to `last_product`.  bounds: as `TileWork.tile_schedule`; acc: the sum of
    the other products; m, total: row maxima and row sums; it: the number of kv tiles of the CTA so far; here: see
    `first_step`.
    """
    first, full_first, full_end, end = bounds
    kv = end - 1
    masks = (kv < full_first) | (kv >= full_end)
    if work.HALF_TILES and work.hides_half(here[2], kv):
        p, m, total = half_tile_step(work, data, shared, score, here, kv, it, m, total)
    else:
        p, m, total, _ = first_step(work, data, drops, shared, score, zero, here, kv, masks, it, m, total)
    p = as_left(p, shared.k.dtype, shared.v.shape[2])
    it += 1
    full_end = gl.minimum(full_end, kv)
    full_first = gl.minimum(full_first, full_end)
    if work.HAS_LO:
        for i in range(kv - full_end):
            p, acc, m, total = next_step(
                work, data, drops, shared, score, zero, here, kv - i, kv - 1 - i, True, it, p, acc, m, total
            )
            it += 1
    for i in range(full_end - full_first):
        p, acc, m, total = next_step(
            work, data, drops, shared, score, zero, here, full_end - i, full_end - 1 - i, False, it, p, acc, m,
            total
        )  # fmt: skip
        it += 1
    if work.HAS_HI:
        for i in range(full_first - first):
            p, acc, m, total = next_step(
                work, data, drops, shared, score, zero, here, full_first - i, full_first - 1 - i, True, it, p,
                acc, m, total
            )  # fmt: skip
            it += 1
    return p, acc, m, total, it


@gluon.jit
def visit_packed_tiles(
    work, data, drops, shared, score, zero, here, it, packed_tile, count, acc, m, total, ME: gl.constexpr
):  # fmt: skip
    """Visits the kv tiles that a q tile's `count` packed tile ids list; returns (acc, m, total).

    packed_tile: the first of them, see Note [Packed tiles] in `listed`.  Consecutive kv tiles without one to skip are a
    run, computed as the tile schedule of a band is.  The product P V of the last tile of a run is not left to a next
    step, because V must be released before later tiles arrive.
    """
    end = it + count
    while it < end:
        if use_of(packed_tile, ME) == SKIP:
            wait_for(shared.k_full, it, shared.STAGES)
            packed_tile = read_packed_tile(shared, it)
            skip(shared, it)
            it += 1
        else:
            masks = use_of(packed_tile, ME) == PARTIAL
            p, m, total, shrink = first_step(
                work, data, drops, shared, score, zero, here, kv_of(packed_tile), masks, it, m, total
            )
            p = as_left(p, shared.k.dtype, shared.v.shape[2])
            if not score.FIXED_BASE:
                acc = scaled(acc, shrink)
                if score.SUMS_BY_MATMUL:
                    total = scaled(total, shrink)
            kv = kv_of(packed_tile)
            packed_tile = read_packed_tile(shared, it)
            it += 1
            while use_of(packed_tile, ME) != SKIP:
                while use_of(packed_tile, ME) == PARTIAL:
                    p, acc, m, total = next_step(
                        work, data, drops, shared, score, zero, here, kv, kv_of(packed_tile), True, it, p, acc, m, total
                    )
                    kv = kv_of(packed_tile)
                    packed_tile = read_packed_tile(shared, it)
                    it += 1
                while use_of(packed_tile, ME) == FULL:
                    p, acc, m, total = next_step(
                        work,
                        data,
                        drops,
                        shared,
                        score,
                        zero,
                        here,
                        kv,
                        kv_of(packed_tile),
                        False,
                        it,
                        p,
                        acc,
                        m,
                        total,
                    )
                    kv = kv_of(packed_tile)
                    packed_tile = read_packed_tile(shared, it)
                    it += 1
            stage, acc, total = last_product(work, drops, shared, score, here, kv, it - 1, p, acc, total)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            release(shared.v_empty.index(stage))
    return acc, m, total


@gluon.jit
def store_logsumexp(lse_ptr, rows, q_len, m, total):
    """Stores the natural log-sum-exp of `rows`, from row maximum (base 2) and row sum; -inf where the sum is zero.

    lse_ptr: that of row 0; rows outside of ``0 .. q_len - 1`` are not stored.
    """
    lse = (m + log2(total)) * 0.6931471805599453
    gl.store(lse_ptr + rows, lse, mask=(rows >= 0) & (rows < q_len))


@gluon.jit
def store_out(shared, out_desc, target, b, head, row, token, q_len, acc, ME: gl.constexpr):
    """Rounds `acc` to 16 bits and starts to store it through shared memory; what lies past the end of the tensor, or of
    the document, is dropped.

    token, q_len: the first token and the length of the document; only read with packed documents, where `target` is
    given.

    A row block before the first one is not stored: a TMA store that begins at a negative row is an illegal instruction,
    whereas a load of such rows gives zeros.

    With OUT_IN_Q, out overwrites q, whose stage is released only when the store has read it; otherwise the function
    waits for the previous store before it writes.
    """
    out = shared.out.index(ME)
    if not shared.OUT_IN_Q:
        wait_until_read()
    role_barrier()
    out.store(acc.to(shared.k.dtype))
    fence_async_shared()
    role_barrier()
    if row >= 0:
        if target is None:
            store_rows(out_desc, b, head, row, out)
        else:
            store_tokens(target, out_desc, b, head, token + row, q_len - row, out, 4)
    if shared.OUT_IN_Q:
        wait_until_read()
        if target is not None:
            role_barrier()  # all threads have read what they stored themselves
        release(shared.q_empty.index(0))
