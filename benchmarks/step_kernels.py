"""Names and times of the attention kernels that a training step ran, from a profile of one step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

KERNELS = {
    "cuDNN": (r"cudnn.*(sdpa|flash|mha|fmha).*(fprop|fwd)", r"cudnn.*(sdpa|flash|mha|fmha).*(bprop|bwd)"),
    "FlashAttention-2": (r"flash_fwd(_splitkv)?_kernel", r"flash_bwd_(dq_dk_dv|dot_do_o|convert_dq)"),
    "FlashAttention-3": (r"FlashAttnFwdSm90", r"FlashAttnBwd(Sm90|Preprocess|PostprocessConvert)?"),
    "FlashAttention-4": (r"cutlass.*flash.*fwd|FlashAttentionForward", r"cutlass.*flash.*bwd|FlashAttentionBackward"),
    "memory-efficient": (r"fmha_cutlassF|attention_kernel_batched_impl", r"fmha_cutlassB|attention_kernel_backward"),
    "FlexAttention": (
        r"triton_tem_fused_\w*flex_attention(?!_backward)",
        r"triton_tem_fused_\w*flex_attention_backward",
    ),
    "dash_inductor": (r"hopper_forward|dash_forward", r"hopper_backward|dash_backward|^(prepare|finish)$"),
}
"""By name of the implementation: patterns of the names of its forward's and its backward's kernels."""

OPERATORS: dict[str, tuple[int | None, int]] = {
    "_scaled_dot_product_cudnn_attention": (3, 6),
    "_scaled_dot_product_efficient_attention": (3, 6),
    "_scaled_dot_product_flash_attention": (None, 4),
}
"""Operators of PyTorch's, and the places of their bias and of `is_causal` among the arguments."""


@dataclass(frozen=True)
class Kernels:
    """The attention kernels of one direction: their name and time in ms; the name is empty if there are none."""

    name: str
    ms: float


def profiled(step: Callable[[], object]) -> tuple[Kernels, Kernels, float]:
    """Returns (forward, backward, ms in which any kernel ran on the GPU) of one step that ends with a
    synchronisation.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as found:
        step()
    events = list(found.events())
    kernels = [(e.name, e.time_range.elapsed_us() / 1e3) for e in events if e.device_type.name == "CUDA"]
    mask = mask_of((e.name, e.input_shapes, getattr(e, "concrete_inputs", [])) for e in events)
    forward, backward = (direction(kernels, which, mask) for which in (0, 1))
    return forward, backward, busy(e.time_range for e in events if e.device_type.name == "CUDA")


def direction(kernels: Iterable[tuple[str, float]], which: int, mask: str = "") -> Kernels:
    """Returns the attention kernels of the forward (0) or the backward (1), from kernels with their times.

    Args:
        mask: the mask that PyTorch's operators were given, in words.
    """
    times: dict[str, float] = {}
    for name, ms in kernels:
        for implementation, patterns in KERNELS.items():
            if re.search(patterns[which], name, re.IGNORECASE):
                times[implementation] = times.get(implementation, 0.0) + ms
                break
    words = [name + (f", {mask}" if mask and name in ("cuDNN", "memory-efficient", "FlashAttention-2") else "")
             for name in times]  # fmt: skip
    return Kernels(" and ".join(words), sum(times.values()))


def mask_of(calls: Iterable[tuple[str, Any, Any]]) -> str:
    """Returns the mask of the first SDPA operator: "causal", "bias of all pairs", "bias of keys" or "no mask".

    Args:
        calls: for each call, name of the operator, shapes of its inputs, and values of inputs that are not tensors.
    """
    for name, shapes, values in calls:
        if name.removeprefix("aten::") not in OPERATORS:
            continue
        bias, is_causal = OPERATORS[name.removeprefix("aten::")]
        if bias is not None and len(shapes) > bias and shapes[bias]:
            return "bias of all pairs" if shapes[bias][-2] > 1 else "bias of keys"
        return "causal" if len(values) > is_causal and str(values[is_causal]) == "True" else "no mask"
    return ""


def busy(ranges: Iterable[Any]) -> float:
    """Returns the time in ms in which at least one of the ranges ran."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((r.start, r.end) for r in ranges):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e3
