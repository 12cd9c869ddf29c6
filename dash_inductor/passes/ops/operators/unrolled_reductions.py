"""Defines `dash_inductor::short_sum`: an unrolled sum over a short dimension.

    short_sum(self, dim) -> Tensor

    self: floating point or integers; its size along `dim` is known at compile time.

The result has the shape of `self` without `dim`.  The elements along `dim` are added in order, in fp32 if `self` is
fp16 or bf16.  Inductor makes the additions part of a pointwise kernel, which also computes or gathers the operands
(`lowering.unrolled_reductions`).

Importing this module imports torch and defines the operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

_lib = torch.library.Library("dash_inductor", "FRAGMENT")
_lib.define("short_sum(Tensor self, int dim) -> Tensor")

short_sum = torch.ops.dash_inductor.short_sum.default

MOST = 16
"""The maximum number of elements of a sum; the kernel contains code for each."""


def _fake(self: Tensor, dim: int) -> Tensor:
    return self.new_empty([*self.shape[:dim], *self.shape[dim + 1 :]])


def _sum(self: Tensor, dim: int) -> Tensor:
    wide = torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype
    first, *others = self.unbind(dim)
    total = first.to(wide)
    for other in others:
        total = total + other
    return total.to(self.dtype).contiguous()


torch.library.register_fake("dash_inductor::short_sum", _fake, lib=_lib)
for _device in ("CPU", "CUDA"):
    _lib.impl("short_sum", _sum, _device)
