"""The main kernel of the forward: a CTA splits into its warp roles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ....common.device.score_gluon import Score
from .consumer import consume
from .documents import Documents
from .dropout import DropoutBits
from .listed import ListedMask
from .producer import produce
from .shared_memory import allocate_shared
from .tile_work import TileWork


@gluon.jit
def hopper_forward(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, counter_ptr, problem, data, elements, dropout, documents, target, bound,
    sinks, SCHEDULE, MASK, FORM,
):  # fmt: skip
    """Computes out and log-sum-exp of attention.

    q: [batch, q_heads, q_len, D]; k: [batch, q_heads // group, kv_len, D]; v: the same with DV columns; out: [batch,
    q_heads, q_len, DV]; fp16 or bf16, descriptors with blocks of 64 columns, ROWS rows of q and out, BLOCK_KV of k and
    v; D is up to BLOCK_D + TAIL_D.  The descriptor of q covers only the rows that see any key, those of k and v only
    the keys that any row sees; all other rows and keys arrive as zeros.  lse: fp32 [batch * q_heads, q_len], natural
    log, -inf in rows that see no key and have no sink, whose out is zero.  counter: int32 [1], zero once the kernel
    before has ended.

    All other arguments are groups, see `arguments`: data describes a mask that is data, see `listed`, and is None where
    the mask is a band; with `elements` only the batch elements that it lists are computed; dropout is given if
    probabilities are dropped, see `dropout`, and bound if scores are bounded, see `score_gluon`, and sinks if there are
    attention sinks.  With `documents`, see the module of this name, batch_heads counts the heads of one batch element,
    and `target` is given, the group `arguments.target` of out.  With packed documents q_len counts padded rows, lse has
    padded rows, and the other tensors have tokens.
    """
    batch_heads = problem.batch_heads
    if elements is not None:
        batch_heads = gl.load(elements.ptr) * problem.q_heads
    work = TileWork(
        batch_heads, problem.q_heads, problem.group, problem.q_len, problem.kv_len, problem.lo, problem.hi,
        problem.head_chunk, problem.last_head_chunk, SCHEDULE.KV_RANGE, SCHEDULE.SEEN_ROWS, SCHEDULE.SEEN_KEYS,
        MASK.HAS_LO, MASK.HAS_HI, MASK.FROM_THE_END, MASK.EVEN_KV, FORM.BLOCK_KV, FORM.CONSUMERS, MASK.HALF_TILES,
    )  # fmt: skip
    rest = ListedMask(
        data, elements, MASK.HAS_DENSE, MASK.SEGMENT_IDS_AHEAD, data is not None, elements is not None, MASK
    )
    packed = Documents(documents, documents is not None)
    drops = DropoutBits(dropout, dropout is not None)
    shared = allocate_shared(q_desc.dtype, FORM, rest.GIVEN, packed.GIVEN)
    fence_async_shared()
    score = Score(problem.scale_log2, bound, bound is not None, FORM.FIXED_BASE, FORM.SUMS_BY_MATMUL)
    # Gluon wants literals: names for them would turn constants into values, and so does what is added to a list.
    if FORM.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (work, rest, packed, drops, shared, out_desc, target, lse_ptr, score, sinks, 0)),
                (consume, (work, rest, packed, drops, shared, out_desc, target, lse_ptr, score, sinks, 1)),
                (produce, (work, rest, packed, shared, q_desc, k_desc, v_desc, counter_ptr)),
            ],
            [4, 1],
            [FORM.REGISTERS, FORM.PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(FORM.CONSUMERS == 3)
        gl.warp_specialize(
            [
                (consume, (work, rest, packed, drops, shared, out_desc, target, lse_ptr, score, sinks, 0)),
                (consume, (work, rest, packed, drops, shared, out_desc, target, lse_ptr, score, sinks, 1)),
                (consume, (work, rest, packed, drops, shared, out_desc, target, lse_ptr, score, sinks, 2)),
                (produce, (work, rest, packed, shared, q_desc, k_desc, v_desc, counter_ptr)),
            ],
            [4, 4, 1],
            [FORM.REGISTERS, FORM.REGISTERS, FORM.PRODUCER_REGISTERS],
        )
