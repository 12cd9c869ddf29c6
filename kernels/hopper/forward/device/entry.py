"""The kernel: a CTA splits into its roles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...shared.device.places import Places, Target
from .consumer import consume
from .drop import Drop
from .listed import Data
from .producer import produce
from .work import Work, allocate_shared


@gluon.jit
def hopper_forward(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, counter_ptr, batch_heads, q_heads, group, q_len, kv_len, lo, hi, section,
    last_section, scale_log2, counts_ptr, steps_ptr, tables, q_codes_ptr, kv_codes_ptr, seen_bits_ptr, keys_seen_ptr,
    seed_ptr, threshold, rescale, place_ptr, count_ptr, out_ptr, out_h, out_row, out_dim,
    KV_RANGE: gl.constexpr, SEEN_ROWS: gl.constexpr, SEEN_KEYS: gl.constexpr, HAS_LO: gl.constexpr,
    HAS_HI: gl.constexpr, FROM_THE_END: gl.constexpr, EVEN_KV: gl.constexpr, BLOCK_KV: gl.constexpr,
    BLOCK_D: gl.constexpr, TAIL_D: gl.constexpr, BLOCK_DV: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, OUT_IN_Q: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_CODES: gl.constexpr, HAS_DENSE: gl.constexpr, DROPOUT: gl.constexpr, CODES_AHEAD: gl.constexpr,
    PLACED: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """out and log-sum-exp of attention.

    q: [batch, q_heads, q_len, D]; k: [batch, q_heads // group, kv_len, D]; v: the same with DV columns; out: [batch,
    q_heads, q_len, DV]; fp16 or bf16, descriptors with blocks of 64 columns, ROWS rows of q and out, BLOCK_KV of k and
    v; D is up to BLOCK_D + TAIL_D.  The descriptor of q holds only the rows that see a key, k's and v's only the keys
    that a row sees: all others arrive as zeros.  lse: fp32 [batch * q_heads, q_len], natural log, -inf in rows that
    see no key, whose out is zero.  counter: int32 [1], zero once the kernel before has ended.  scale_log2: of the
    scores, with log2(e), above zero.  `counts_ptr` to `keys_seen_ptr` describe a mask that is data, see `listed.Data`;
    None where the mask is a band.

    With PLACED, above 0, the mask is one of rows: q_len and kv_len count rows, lse has rows, and the other tensors
    have tokens; see `places`, also for the last arguments, which are given then only.
    """
    work = Work(
        batch_heads, q_heads, group, q_len, kv_len, lo, hi, section, last_section,
        KV_RANGE, SEEN_ROWS, SEEN_KEYS, HAS_LO, HAS_HI, FROM_THE_END, EVEN_KV, BLOCK_KV, CONSUMERS, HALVES,
    )  # fmt: skip
    data = Data(
        counts_ptr, steps_ptr, tables, q_codes_ptr, kv_codes_ptr, seen_bits_ptr, keys_seen_ptr, HAS_CODES, HAS_DENSE,
        CODES_AHEAD,
    )  # fmt: skip
    places = Places(place_ptr, count_ptr, q_len, PLACED)
    target = Target(out_ptr, out_h, out_row, out_dim)
    drop = Drop(seed_ptr, threshold, rescale, DROPOUT)
    shared = allocate_shared(
        q_desc.dtype, BLOCK_KV, BLOCK_D, TAIL_D, BLOCK_DV, Q_STAGES, STAGES, CONSUMERS, OUT_IN_Q, data.GIVEN
    )
    fence_async_shared()
    # Gluon wants both lists literal: names for their entries would turn constants into values.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (work, data, places, drop, shared, out_desc, target, lse_ptr, scale_log2, 0)),
                (consume, (work, data, places, drop, shared, out_desc, target, lse_ptr, scale_log2, 1)),
                (produce, (work, data, places, shared, q_desc, k_desc, v_desc, counter_ptr)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (consume, (work, data, places, drop, shared, out_desc, target, lse_ptr, scale_log2, 0)),
                (consume, (work, data, places, drop, shared, out_desc, target, lse_ptr, scale_log2, 1)),
                (consume, (work, data, places, drop, shared, out_desc, target, lse_ptr, scale_log2, 2)),
                (produce, (work, data, places, shared, q_desc, k_desc, v_desc, counter_ptr)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
