"""Defines `dash_inductor::few_sums`: segment sums by a matmul with the one-hot matrix of their keys.

    few_sums(base, values, keys, rows) -> Tensor

    base: [batch, rows, columns] with the dtype of `values`, or None for zeros.
    values: [batch, n, columns], floating point of 16 or 32 bits.
    keys: integers [n], from 0 to `rows`, in any order; values with the key `rows` are skipped.

The result is contiguous, [batch, rows, columns].  Row r is that of `base` plus the sum, in fp32, of the values with
key r.  Keys are not sorted, which is faster for few rows.

Raises ArgumentError on CUDA for sizes above `index_sums.MOST`.
Importing this module imports torch and defines the operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .index_sums import check_sizes

_lib = torch.library.Library("dash_inductor", "FRAGMENT")
_lib.define(
    "few_sums(Tensor? base, Tensor values, Tensor keys, SymInt rows) -> Tensor", tags=(torch.Tag.flexible_layout,)
)
few_sums = torch.ops.dash_inductor.few_sums.default


def _fake(base: Tensor | None, values: Tensor, keys: Tensor, rows: int) -> Tensor:
    return values.new_empty((values.shape[0], rows, values.shape[2]))


def _on_cpu(base: Tensor | None, values: Tensor, keys: Tensor, rows: int) -> Tensor:
    batch, _, columns = values.shape
    sums = torch.zeros((batch, rows + 1, columns), dtype=torch.float32).index_add_(1, keys.long(), values.float())
    total = sums[:, :rows] if base is None else base + sums[:, :rows]
    return total.to(values.dtype, copy=True).contiguous()  # a tensor without the row of skipped values


def _on_cuda(base: Tensor | None, values: Tensor, keys: Tensor, rows: int) -> Tensor:
    from ..kernels.sums.one_hot_matmul import add_few

    check_sizes(rows, values, keys)
    return add_few(base, values, keys, rows)


torch.library.register_fake("dash_inductor::few_sums", _fake, lib=_lib)
_lib.impl("few_sums", _on_cpu, "CPU")
_lib.impl("few_sums", _on_cuda, "CUDA")
