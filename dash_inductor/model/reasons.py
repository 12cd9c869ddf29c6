"""Why an attention backward is kept as PyTorch had it: `Reason`, the complete list."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """One member per cause; the value is the name used in records, logs and traces.

    Attributes:
        explanation: one sentence for users.
    """

    explanation: str

    def __new__(cls, value: str, explanation: str = "") -> Reason:
        member = object.__new__(cls)
        member._value_ = value
        member.explanation = explanation
        return member

    CPU_OFF = "cpu_off", "PyTorch's CPU kernel is deterministic already; cpu='reference' replaces it."
    DEVICE = "device", "Only CUDA devices (not ROCm) and the CPU are supported."
    UNSUPPORTED_OP = "unsupported_op", "This attention operator is not one that is replaced."
    MATH_PATH = "math_path", "PyTorch computes this call by its math implementation, without a fused operator."
    VARLEN = (
        "varlen",
        "Packed attention is replaced where queries and keys have the same documents; the detail says what differs.",
    )
    FLEX_ATTENTION = "flex_attention", "FlexAttention has a backward of its own, which is not replaced."
    DROPOUT = (
        "dropout",
        "Dropout is replaced only together with its forward, by kernels that have it; the detail says what is missing.",
    )
    DTYPE = "dtype", "Only float16, bfloat16 and float32 are supported, the same for all tensors of a site."
    HEAD_DIM = (
        "head_dim",
        "No kernel for this device and dtype has this head dimension; the detail lists those there are.",
    )
    VALUE_DIM = (
        "value_dim",
        "No kernel for this device and dtype has a head dimension of value that differs so from that of query and key.",
    )
    SHAPE = "shape", "The shapes are not those of [batch, heads, length, head_dim] attention."
    DYNAMIC_DIMS = (
        "dynamic_dims",
        "Heads, head dimension or scale depend on data or were marked as dynamic: no guard can fix them.",
    )
    CAUSAL_LENGTHS = "causal_lengths", "Causal flash attention is replaced only where query and key lengths are equal."
    BIAS_GRADIENT = (
        "bias_gradient",
        "The attention bias needs a gradient, which no kernel for this device and head dimension gives.",
    )
    MASK_DEPENDS_ON_INPUT = (
        "mask_depends_on_input",
        "Model inputs decide in the mask more than who sees whom, or may hide all keys of a query by a finite value.",
    )
    MASK_NOT_A_BAND = "mask_not_a_band", "The mask is not a diagonal band, or not proved to be one for every length."
    MASK_UNKNOWN_OP = "mask_unknown_op", "The mask is computed by an operation that cannot be read back."
    MASK_VALUE_MISMATCH = "mask_value_mismatch", "The mask's values are not those of the terms that were read back."
    MASK_UNSUPPORTED = "mask_unsupported", "No kernel for this device and head dimension reads a mask of this kind."
    FORWARD_KEPT = (
        "forward_kept",
        "A query may be left without keys, and the log-sum-exp of a kept forward does not tell which.",
    )
    LAYOUT = "layout", "A gradient or the log-sum-exp has a memory layout that cannot be produced or read."
    SCHEDULE_UNSUPPORTED = "schedule_unsupported", "The planner has no plan for this site."
    COMPILE_FAILED = "compile_failed", "A kernel of this site does not compile for this device, or does not fit it."
    PASSES_OFF = "passes_off", "Inductor's settings let no joint-graph pass run, so that nothing is replaced."
    INTERNAL_ERROR = "internal_error", "Replacing this site failed unexpectedly: please report it."
