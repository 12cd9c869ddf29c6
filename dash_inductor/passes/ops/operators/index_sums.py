"""Defines `dash_inductor::index_sums`: segment sums by sorted keys.

    index_sums(base, values, keys, order, rows) -> Tensor

    base: [batch, rows, columns] with the dtype of `values`, or None for zeros.
    values: [batch, m, columns], floating point.
    keys: integers [n], sorted, from 0 to `rows`; entries with the key `rows` are skipped.
    order: int64 or int32 [n], from 0 to m - 1: the row of `values` for each key; rows may repeat.

The result is contiguous, [batch, rows, columns].  Row r is that of `base` plus the sum of the values with key r,
computed in fp32, or in fp64 for fp64 values.

Raises ArgumentError on CUDA for sizes above `MOST`.
Importing this module imports torch and defines the operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....errors import ArgumentError
from ....operators.direct import call_directly

_lib = torch.library.Library("dash_inductor", "FRAGMENT")
_lib.define(
    "index_sums(Tensor? base, Tensor values, Tensor keys, Tensor order, SymInt rows) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
index_sums = torch.ops.dash_inductor.index_sums.default

MOST = 2**31 - 2**11
"""The maximum number of rows and entries: keys and positions are 32-bit, also those after the end of the last chunk."""


def check_sizes(rows: int, values: Tensor, keys: Tensor) -> None:
    """Checks that the sizes of a segment sum fit into the kernels' 32-bit indices.

    Args:
        rows: the number of rows of the result.
        values: [batch, m, columns].
        keys: [n].

    Raises:
        ArgumentError: `rows` or a size of these tensors is greater than `MOST`.
    """
    batch, count, columns = values.shape
    numbers = {"rows": rows, "batch": batch, "values": count, "columns": columns, "keys": keys.shape[0]}
    for name, number in numbers.items():
        if number > MOST:
            raise ArgumentError(name, number, f"at most {MOST}")


def _fake(base: Tensor | None, values: Tensor, keys: Tensor, order: Tensor, rows: int) -> Tensor:
    return values.new_empty((values.shape[0], rows, values.shape[2]))


def _on_cpu(base: Tensor | None, values: Tensor, keys: Tensor, order: Tensor, rows: int) -> Tensor:
    exact = torch.float64 if values.dtype == torch.float64 else torch.float32
    batch, _, columns = values.shape
    sums = torch.zeros((batch, rows + 1, columns), dtype=exact)
    sums.index_add_(1, keys.long(), values.index_select(1, order).to(exact))
    total = sums[:, :rows] if base is None else base + sums[:, :rows]
    return total.to(values.dtype, copy=True).contiguous()  # a tensor without the row of skipped values


def _on_cuda(base: Tensor | None, values: Tensor, keys: Tensor, order: Tensor, rows: int) -> Tensor:
    from ..kernels.sums.launch import add_segments

    check_sizes(rows, values, keys)
    return add_segments(base, values, keys, order, rows)


def _run(base: Tensor | None, values: Tensor, keys: Tensor, order: Tensor, rows: int) -> Tensor:
    return (_on_cuda if values.is_cuda else _on_cpu)(base, values, keys, order, rows)


torch.library.register_fake("dash_inductor::index_sums", _fake, lib=_lib)
_lib.impl("index_sums", _on_cpu, "CPU")
_lib.impl("index_sums", _on_cuda, "CUDA")
call_directly(index_sums, _run)
