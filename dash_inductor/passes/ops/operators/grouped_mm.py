"""Defines `dash_inductor::grouped_mm`: a grouped matmul that leaves no element unwritten.

    grouped_mm(self, mat2, offs, bias, out_dtype) -> Tensor

Arguments and result are those of `aten::_grouped_mm`, which does not write the rows after the last offset (or columns,
if the groups divide the columns).  Under deterministic algorithms PyTorch fills the whole result with NaN before that
operator runs; this one fills only the unwritten part, afterwards.

Importing this module imports torch and defines the operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

_lib = torch.library.Library("dash_inductor", "FRAGMENT")
_lib.define(
    "grouped_mm(Tensor self, Tensor mat2, Tensor? offs=None, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
PLAIN = torch.ops.aten._grouped_mm.default
grouped_mm = torch.ops.dash_inductor.grouped_mm.default


def _plain(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    found: Tensor = PLAIN(self, mat2, offs, bias, out_dtype)
    return found


def _on_cpu(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    out = _plain(self, mat2, offs, bias, out_dtype)
    if offs is not None and self.dim() != mat2.dim():
        last = int(offs[-1]) if offs.numel() else 0
        rest = out[last:] if self.dim() == 2 else out[:, last:]
        rest.fill_(float("nan"))
    return out


def _on_cuda(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    from ..kernels.groups.launch import fill_behind

    out = _plain(self, mat2, offs, bias, out_dtype)
    if offs is not None and self.dim() != mat2.dim():
        fill_behind(out, offs, dim=0 if self.dim() == 2 else 1)
    return out


torch.library.register_fake("dash_inductor::grouped_mm", _plain, lib=_lib)
_lib.impl("grouped_mm", _on_cpu, "CPU")
_lib.impl("grouped_mm", _on_cuda, "CUDA")
