"""Operations that Gluon lacks or names differently in its versions, and the wait for and release of a semaphore.

Note [Ordered accumulation on Hopper]
    Every (batch element, query head, q tile) has a semaphore that counts the contributions already added to its fp32 dq
    tile.  The reduce warp of the contributor of rank r

        1. spins on ``ld.acquire.gpu`` until the semaphore is r (every lane polls, so every lane has acquired what was
           released before), then executes ``fence.proxy.async``: its bulk operation, which goes through the async
           proxy, comes after the release that it saw.
        2. waits until the tile lies in shared memory (mbarrier), and issues ``cp.reduce.async.bulk.tensor .add``; rank
           0 issues a plain bulk store instead, so the accumulator needs no zero fill.
        3. waits for ``cp.async.bulk.wait_group.read 0``: the shared memory has been read, the buffer is free.
        4. waits for ``cp.async.bulk.wait_group 0``: the add has been performed.  Bulk groups belong to the thread that
           issued them, so every lane waits.
        5. meets the other lanes at ``bar.warp.sync``; then one lane does ``st.release.gpu`` of r + 1.

    Hence adds to one element of dq happen in rank order.  Steps 3 and 4 are apart (early release): the matmuls need the
    buffer, not the sum.  `wait_until_read` is step 3, which would be too early for step 5.

    dk and dv of grouped heads are summed in the same way (`group`), by the threads that hold them.  The producer spins
    for them, while the last steps run, and arrives at an mbarrier; having waited there, they have acquired what it has.
    They add with ordinary reductions and meet at a barrier; then one thread releases the semaphore.  Only one: a warp
    that fell behind the others' release would set the semaphore back when later members have released it, and the next
    would wait for ever.

Note [Forward progress on Hopper]
    A CTA takes work ids one after the other, and works on them in that order.  It takes the next one when everything
    that the one before needs is on its way, so it holds two at most.  Whoever takes a work id finds that all lower ones
    have been taken, by CTAs that run; a CTA that has not started holds none and is not needed.  In a launch-ordered
    schedule every wait is for a lower work id, and what comes before a work id in its CTA is lower, too.  So by
    induction over work ids every work id is finished, on any number of SMs and by any number of CTAs.  The member of a
    group before this one has a lower work id in every schedule.

    Schedules that wait both ways have a CTA for every work id, which takes no other, and are launched cooperatively:
    there a CTA's later work id could be what its current one waits for.

    Inside a CTA producer, consumers and reducers wait for one another through mbarriers, and through named barriers at
    which consumers only arrive, see Note [Signals of consumers] in `step_signals`; a reducer that waits for its
    semaphore stops its consumers when all dq buffers are full or a tile schedule ends, never another CTA that is not
    behind it in rank. Work id and semaphores are set by `prepare` in the same call.

    The three kernels of a call overlap (programmatic dependent launch).  A CTA of the main kernel first waits for the
    end of `prepare`, then lets `finish` start.  CTAs of `finish` may start when every CTA of the main kernel has done
    so: semaphores have been reset by then, and what they wait for, the last contribution to a tile, comes from CTAs
    that are running, and take all work ids there are.  They find room on SMs that the main kernel has left: a CTA of it
    has all registers of its SM.  The last of them also waits for the end of the main kernel, so that whatever follows
    the call in its stream follows all of it.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait
from triton.experimental.gluon.language.nvidia.hopper.tma import store_wait

from .....upstream import compat
from .....upstream.gluon import builtin, ir

# Operations whose names differ between versions of Gluon:
role_barrier = compat.resolve(*compat.BARRIER)
"""Barrier among the warps of a role."""
begin_copy = compat.resolve(*compat.COPY)
"""``(tile, pointers)``: starts an asynchronous copy from global pointers to shared memory."""
begin_load = compat.resolve(*compat.TMA_LOAD)
"""``(desc, coordinates, barrier, tile)``: start to copy a block to shared memory by TMA."""
begin_store = compat.resolve(*compat.TMA_STORE)
"""``(desc, coordinates, tile)``: start to copy a block from shared memory by TMA."""
_reinterpret = compat.resolve(*compat.REINTERPRET)

_READS_ONLY = compat.reads_only()
_WAITS_MEET = compat.waits_meet()
ARRIVALS_MEET = gl.constexpr(compat.arrivals_meet())
COMPUTES_EARLY = gl.constexpr(compat.computes_early())


@builtin
def wait_for_matmuls(outstanding, deps, _semantic=None):
    """Waits until at most `outstanding` of the asynchronous matmuls that this warpgroup has issued are in flight.

    Args:
        outstanding: how many may stay in flight: those issued last.
        deps: the tensors that are used afterwards, or have to stay in registers until then.

    Returns:
        The tensors of `deps` as a tuple, or the tensor itself if there is one.

    Warpgroups do not wait for each other.  Where memory may be overwritten only after all of them have read it, they
    use barriers of their own, see Note [Signals of consumers] in `step_signals`.  In the forward a consumer is one
    warpgroup, so that Gluon's own wait is enough.
    """
    results = warpgroup_mma_wait(outstanding, deps, _semantic=_semantic)
    if _WAITS_MEET:
        one = results[0] if isinstance(results, tuple) else results
        one.handle.set_attr("warpGroupLocal", _semantic.builder.get_unit_attr())
    return results


@builtin
def wait_until_read(_semantic=None):
    """Waits until this warp's asynchronous stores and adds have read shared memory; they may still be in progress."""
    store_wait(0, _semantic=_semantic, **_READS_ONLY)


@gluon.jit
def wait_for_own_stores():
    """Waits as `wait_until_read` does, but without the barrier among the role's warps that Triton adds to it."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group.read 0; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@builtin
def async_reduce_add(tensor_desc, coord, src, _semantic=None):
    """Starts to add the tile `src` in shared memory to global memory at `coord`: ``cp.reduce.async.bulk.tensor .add``
    and commit.

    Triton 3.8 has a function of its own for it.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.constexpr_function
def _block_shapes(tile, block):
    return [math.prod(tile) // math.prod(block), *block]


@gluon.jit
def as_blocks(tile, desc):
    """Returns a [rows, columns] tile in shared memory as a view [blocks, *block shape of the descriptor `desc`].

    A swizzle atom has 64 columns of 16 bits: in shared memory a wider or longer tile consists of consecutive blocks.
    """
    return _reinterpret(tile, desc.dtype, _block_shapes(tile.shape, desc.block_type.shape), desc.layout)


@gluon.jit
def as_tiles(buffer, tile, COUNT: gl.constexpr):
    """Returns a shared-memory buffer as a view of COUNT consecutive tiles of the shape, dtype and layout of `tile`."""
    return _reinterpret(buffer, tile.dtype, [COUNT, tile.shape[0], tile.shape[1]], tile.layout)


@gluon.constexpr_function
def _longer_shapes(pieces, count):
    return [count, pieces[0] * pieces[1] // count, *pieces[2:]]


@gluon.jit
def as_longer(ring, COUNT: gl.constexpr):
    """Returns a ring of pieces in shared memory as a view of COUNT longer pieces.

    Pieces are rows of numbers or tiles of 64 columns.  Consecutive pieces are adjacent in memory, as the rows of a tile
    are, so that a longer piece consists of several of them.
    """
    return _reinterpret(ring, ring.dtype, _longer_shapes(ring.shape, COUNT), ring.layout)


@gluon.constexpr_function
def _word_shapes(tile, bits):
    return [tile[0] * tile[1] // 64 // 4, 4, 64 * bits // 32]


@gluon.jit
def as_words(tile):
    """Returns a [rows, columns] tile in shared memory as an int32 view [groups of four rows, 4, words of a row].

    A row here is a row of one block of 64 columns; the rows of a block are adjacent, because swizzling only permutes
    within a row.
    """
    SHAPE: gl.constexpr = _word_shapes(tile.shape, tile.dtype.primitive_bitwidth)
    return _reinterpret(tile, gl.int32, SHAPE, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


DQ_ROW = gl.constexpr(256)
"""Values in a row of a dq tile as it goes to global memory, the most that a block of a descriptor may have."""
DQ_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(0, 32, rank=2))
"""Rows lie one after the other there.  Causal masks at D=64 took 1.2 % longer with a swizzled tile, others as long."""


@gluon.jit
def load_rows(desc, b, h, row, full, tile, COLUMN: gl.constexpr = 0):
    """Starts TMA loads of a head's rows from `row` on, and columns from COLUMN on, into `tile` in shared memory.

    full: the mbarrier that the loads complete.  b, h: batch element and head.
    """
    blocks = as_blocks(tile, desc)
    for i in gl.static_range(tile.shape[1] // desc.block_type.shape[3]):
        column = COLUMN + i * desc.block_type.shape[3]
        begin_load(desc, [b, h, row, column], full, blocks.index(i))


@gluon.jit
def store_rows(desc, b, h, row, tile, COLUMN: gl.constexpr = 0):
    """Starts TMA stores of `tile`, in shared memory, to a head's rows from `row` on and columns from COLUMN on.

    b, h: batch element and head.  What lies outside the tensor is dropped.
    """
    blocks = as_blocks(tile, desc)
    for i in gl.static_range(tile.shape[1] // desc.block_type.shape[3]):
        column = COLUMN + i * desc.block_type.shape[3]
        begin_store(desc, [b, h, row, column], blocks.index(i))


@gluon.jit
def here(number):
    """Returns an int32 through opaque inline assembly, so that what depends on it is computed at this point.

    Otherwise the compiler would hoist the computation out of the loop and keep the result in registers, which are
    scarce.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def hold_back(length):
    """Keeps ptxas from moving later instructions before earlier ones, by a branch that is never taken.

    length: any number that is not negative, opaque to the compiler.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred %back;
        BACK:
        setp.lt.s32 %back, $1, 0;
        @%back nanosleep.u32 0;
        @%back bra BACK;
        mov.b32 $0, $1;
        }""",
        "=r,r",
        [length],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def not_before(number):
    """Returns an int32 through inline assembly, so that nothing that depends on it is computed ahead in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rounded_from_zero(x, dtype: gl.constexpr):
    """Returns fp32 numbers rounded to `dtype` (fp16 or bf16), with negative ones replaced by zero."""
    if dtype == gl.bfloat16:
        rounded = gl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        rounded = gl.inline_asm_elementwise(
            "cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return rounded


@gluon.jit
def arrive_at(number, THREADS: gl.constexpr):
    """Arrives at named barrier `number` of the CTA without waiting; called by all threads of a role.

    THREADS: how many threads take part, arriving or waiting.
    """
    _at_named("arrive", number, THREADS)


@gluon.jit
def meet_at(number, THREADS: gl.constexpr):
    """Arrives at named barrier `number` of the CTA and waits until it is complete; called by all threads of a role.

    THREADS: how many threads take part, arriving or waiting.
    """
    _at_named("sync", number, THREADS)


@gluon.jit
def _at_named(HOW: gl.constexpr, number, THREADS: gl.constexpr):
    gl.inline_asm_elementwise(
        "barrier.cta." + HOW + " $1, $2; mov.b32 $0, $1;", "=r,r,r", [number, THREADS], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def wait_semaphore(semaphore, rank):
    """Spins until the int32 at the address `semaphore` equals `rank`, then orders later bulk operations after that."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred %waiting;
        .reg .b32 %seen;
        TURN:
        ld.acquire.gpu.global.b32 %seen, [$1];
        setp.ne.s32 %waiting, %seen, $2;
        @%waiting bra TURN;
        fence.proxy.async;
        mov.b32 $0, %seen;
        }""",
        "=r,l,r",
        [semaphore, rank],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def release_semaphore(semaphore, rank):
    """Waits for this warp's bulk operations to complete, then sets `semaphore` to ``rank + 1``; for one-warp roles."""
    _release(semaphore, rank + 1, "cp.async.bulk.wait_group 0;\nbar.warp.sync 0xffffffff;", "%laneid")


@gluon.jit
def consumers_release_semaphore(semaphore, rank):
    """Meets the other consumers at a barrier, after which thread 0, a consumer, sets `semaphore` to ``rank + 1``."""
    role_barrier()
    _release(semaphore, rank + 1, "", "%tid.x")


@gluon.jit
def _release(semaphore, value, BEFORE: gl.constexpr, REGISTER: gl.constexpr):
    """After the instructions BEFORE, the thread whose REGISTER is 0 sets `semaphore`; the others go on."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred %first;
        .reg .b32 %number;
        """
        + BEFORE
        + """
        mov.u32 %number, """
        + REGISTER
        + """;
        setp.eq.u32 %first, %number, 0;
        @%first st.release.gpu.global.b32 [$1], $2;
        mov.b32 $0, $2;
        }""",
        "=r,l,r",
        [semaphore, value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
