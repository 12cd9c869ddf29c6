"""The host side of split-KV attention for few queries and many keys: compiles and launches the kernels.

Note [Parts of the keys] in `device.few` describes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from ....model.site import DType, Site
from ....upstream.triton_compiler import ASTSource
from ...common import launcher, score
from ...common.call_launches import CallLaunch, CallLaunches, named_arguments, unknown_addresses
from ...common.compiling import TYPES, compile_kernel
from ...common.layouts import kernel_strides
from ...common.strides import dense_strides
from ..kernel_configs import FEW_LEAST_ROWS, MOST_PARTS, has_few, part_of
from ..shared.prepared import Launch
from . import arguments
from .device.few import attend, combine


def _power_of_two(number: int) -> int:
    """Rounds up to a power of two."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Specialisation:
    """What the split-KV kernels are compiled for (dtype, head dims, rows of a q tile); kernels are cached by it."""

    dtype: DType
    head_dim: int
    value_dim: int
    rows: int

    @staticmethod
    def of_site(site: Site) -> Specialisation:
        """Returns the specialisation for an attention site with a static q_len, for which `has_few` must be true."""
        assert site.q_len is not None
        rows = max(FEW_LEAST_ROWS, _power_of_two(site.group * site.q_len))
        return Specialisation(site.dtype, site.head_dim, site.value_dim, rows)


class Kernels:
    """The split-KV kernels `attend` and `combine` of a `Specialisation`; each is compiled when it is first accessed."""

    def __init__(self, of: Specialisation) -> None:
        self.of = of
        wide = max(of.head_dim, of.value_dim) > 128
        self.form = arguments.Few(
            of.rows, 32 if wide else 64, of.head_dim, max(16, _power_of_two(of.head_dim)), of.value_dim,
            max(16, _power_of_two(of.value_dim)),
        )  # fmt: skip

    @cached_property
    def attend(self) -> Any:
        dtype = f"*{TYPES[self.of.dtype]}"
        types: dict[str, Any] = {
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), dtype), **dict.fromkeys(("acc_ptr", "sums_ptr"), "*fp32"),
            **dict.fromkeys(("q_strides", "k_strides", "v_strides"), arguments.FEW_STRIDES), "scale_log2": "fp32",
        }  # fmt: skip
        stages = 2 if self.form.BLOCK_KV == 64 else 3
        return compile_kernel(attend, ASTSource, {"FORM": self.form}, types, {"num_warps": 4, "num_stages": stages})

    @cached_property
    def combine(self) -> Any:
        types: dict[str, Any] = {
            **dict.fromkeys(("acc_ptr", "sums_ptr", "lse_ptr"), "*fp32"), "out_ptr": f"*{TYPES[self.of.dtype]}",
            "out_strides": arguments.FEW_STRIDES,
        }  # fmt: skip
        constants = {"FORM": self.form, "PARTS": MOST_PARTS}
        return compile_kernel(combine, ASTSource, constants, types, {"num_warps": 4, "launch_pdl": True})


@cache
def kernels(of: Specialisation, device: int) -> Kernels:
    """Returns the compiled `Kernels` of a specialisation for a device index, from a cache.

    Each device has its own, since a kernel is loaded into one device.
    """
    return Kernels(of)


def of_site(site: Site, device: int) -> Kernels | None:
    """Returns the split-KV kernels for a site on a device index, or None if q_len is dynamic or `has_few` is false."""
    if site.q_len is None or not has_few(site.spec.traits, site.q_len, site.group):
        return None
    return kernels(Specialisation.of_site(site), device)


def launches(site: Site, query: Tensor, key: Tensor, value: Tensor) -> Launch:
    """Returns a launcher of the split-KV kernels for tensors with these layouts; `suits_parts` must be true for the
    call.

    Args:
        site: the attention site of the call.
        query: [batch, q heads, q_len, head dim].
        key, value: [batch, kv heads, kv_len, head dim or value dim].
    """
    (batch, kv_heads, kv_len, _), (_, q_heads, q_len, _) = key.shape, query.shape
    of, part = Specialisation.of_site(site), part_of(kv_len)
    parts = -(-kv_len // part)
    shape, sums = (*query.shape[:3], site.value_dim), (batch, q_heads, q_len)
    strides = kernel_strides(shape, site.spec.orders[0])
    built = kernels(of, query.device.index)
    programs = batch * kv_heads * parts
    accumulators = programs * of.rows * built.form.BLOCK_DV  # sums follow them
    allocated = (
        (shape, strides, query.dtype), (sums, dense_strides(sums, (0, 1, 2)), torch.float32),
        ((accumulators + 2 * programs * of.rows,), (1,), torch.float32),
    )  # fmt: skip
    q, k, v, out, lse, acc = unknown_addresses(6)
    partial_sums, of_sizes = acc + 4 * accumulators, {"group": site.group, "q_len": q_len, "parts": parts}
    of_attend = named_arguments(
        attend, q_ptr=q, k_ptr=k, v_ptr=v, acc_ptr=acc, sums_ptr=partial_sums, q_strides=query.stride()[:3],
        k_strides=key.stride()[:3], v_strides=value.stride()[:3], kv_heads=kv_heads, kv_len=kv_len, part_len=part,
        scale_log2=site.spec.scale * score.LOG2E, **of_sizes,
    )  # fmt: skip
    of_combine = named_arguments(
        combine, acc_ptr=acc, sums_ptr=partial_sums, out_ptr=out, lse_ptr=lse, out_strides=strides[:3],
        q_heads=q_heads, **of_sizes,
    )  # fmt: skip
    asked = [
        CallLaunch(launcher.KernelLauncher(built.attend, programs), (), of_attend),
        CallLaunch(launcher.KernelLauncher(built.combine, math.prod(sums)), (), of_combine),
    ]
    return CallLaunches(asked, allocated, 2, query.device.index).run
