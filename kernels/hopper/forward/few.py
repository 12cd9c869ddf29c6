"""Split-KV forward for few queries and many keys: kernels and launches, see Note [Parts of the keys] in
`device.few`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from ....model.site import DType, Site
from ....upstream import compat
from ....upstream.cuda import raw_stream
from ....upstream.triton_compiler import ASTSource
from ...common import launcher, score
from ...common.call_launches import CallLaunch, CallLaunches, unknown_addresses
from ...common.compiling import TYPES, compile_kernel
from ...common.strides import dense_strides
from ..kernel_configs import FEW_LEAST_ROWS, MOST_PARTS, has_few, part_of
from ..shared.tensors import DTYPES
from . import arguments
from .device.few import attend, combine

_Strides = tuple[int, ...]


def _power_of_two(number: int) -> int:
    """Rounds up to a power of two."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Specialisation:
    """The specialisation key of the kernels: dtype, head dims, rows of a tile."""

    dtype: DType
    head_dim: int
    value_dim: int
    rows: int

    @staticmethod
    def of(dtype: DType, dims: tuple[int, int], q_len: int, group: int) -> Specialisation:
        """Returns the specialisation for a call for which `has_few` is true."""
        return Specialisation(dtype, *dims, max(FEW_LEAST_ROWS, _power_of_two(group * q_len)))


class Kernels:
    """attend and combine of a `Specialisation`, compiled on first use."""

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
    """Returns the kernels of a specialisation for a device; each device needs its own, since kernels are loaded into
    one.
    """
    return Kernels(of)


def of_site(site: Site, device: int) -> Kernels | None:
    """Returns the split-KV kernels for a site, or None unless its q_len is static and `has_few` is true."""
    if site.q_len is None or not has_few(site.call.traits, site.q_len, site.group):
        return None
    return kernels(Specialisation.of(site.dtype, (site.head_dim, site.value_dim), site.q_len, site.group), device)


class State:
    """The cached launches for one combination of scale, shapes and strides on one device, as `launch._State`."""

    def __init__(
        self, scale: float, order: tuple[int, ...], dtype: torch.dtype, device: torch.device, q_shape: torch.Size,
        q: _Strides, k: _Strides, v_shape: torch.Size, v: _Strides,
    ) -> None:  # fmt: skip
        batch, q_heads, q_len, head_dim = q_shape
        _, kv_heads, kv_len, value_dim = v_shape
        group = q_heads // kv_heads
        of = Specialisation.of(DTYPES[dtype], (head_dim, value_dim), q_len, group)
        part = part_of(kv_len)
        parts = -(-kv_len // part)
        shape, sums = (*q_shape[:3], value_dim), (batch, q_heads, q_len)
        self.device = device
        self.out = shape, dense_strides(shape, order if order[-1] == 3 else (0, 1, 2, 3)), dtype
        self.lse = sums, dense_strides(sums, (0, 1, 2)), torch.float32
        built = kernels(of, device.index)
        programs = batch * kv_heads * parts
        self.acc = (programs * of.rows * (built.form.BLOCK_DV + 2),), (1,), torch.float32
        self.behind_acc = 4 * programs * of.rows * built.form.BLOCK_DV
        self.sizes = q[:3], k[:3], v[:3], kv_heads, group, q_len, kv_len, part, parts, scale * score.LOG2E
        self.combine_sizes = self.out[1][:3], q_heads, group, q_len, parts
        self.attend = launcher.KernelLauncher(built.attend, programs)
        self.combine = launcher.KernelLauncher(built.combine, batch * q_heads * q_len)
        self.launches = CallLaunches(self._launches_of_call())

    def run(
        self, operands: tuple[int, int, int], data: object = None, seed: object = None, sinks: object = None
    ) -> tuple[Tensor, Tensor]:
        """Returns (out, log-sum-exp) for the addresses of query, key and value; the other arguments are always None."""
        empty = compat.empty_cuda
        out, lse, acc = empty(*self.out), empty(*self.lse), empty(*self.acc)
        self.launches.run(
            raw_stream(self.device.index), (*operands, out.data_ptr(), lse.data_ptr(), acc.data_ptr())
        )  # fmt: skip
        return out, lse

    def _launches_of_call(self) -> tuple[CallLaunch, ...]:
        """Returns the two launches; addresses are numbered in the order of `run`."""
        q, k, v, out, lse, acc = unknown_addresses(6)
        sums = acc + self.behind_acc
        return (
            CallLaunch(self.attend, (), (q, k, v, acc, sums, *self.sizes)),
            CallLaunch(self.combine, (), (acc, sums, out, lse, *self.combine_sizes)),
        )
