"""Lowering of `band_sum`: a pointwise kernel that adds few terms, or a reduction of many.

What is added is computed where it is read.  As operators of a graph, Inductor would write it, and the products, which
are several times as large, once they took more than a few reads or operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..operators.band_sums import band_sum
from ..operators.short_sums import MOST, short_sum
from ..upstream.inductor import Pointwise, TensorBox, lowerings, ops, register_lowering


def register() -> None:
    register_lowering(band_sum, type_promotion_kind=None)(_sum)


def _sum(tensor: TensorBox, begins: TensorBox, weights: TensorBox, dim: int) -> TensorBox:
    """Shapes and meaning as in `operators.band_sums`."""
    size, (longest, rows), dtype = tensor.get_size(), weights.get_size(), weights.get_dtype()
    value, begin, weight = (each.make_loader() for each in (tensor, begins, weights))

    def term(index: Sequence[Any]) -> Any:
        row, place = index[dim : dim + 2]
        number = ops.add(begin([row]), ops.index_expr(place, torch.int32))
        position = ops.indirect_indexing(number, size[dim], check=False, wrap_neg=False)
        found = ops.to_dtype(value([*index[:dim], position, *index[dim + 2 :]]), dtype)
        by, zero = weight([place, row]), ops.constant(0.0, dtype)
        return ops.where(ops.ne(by, zero), ops.mul(by, found), zero)

    ranges = [*size[:dim], rows, longest, *size[dim + 1 :]]
    terms = Pointwise.create(device=tensor.get_device(), dtype=dtype, inner_fn=term, ranges=ranges)
    total = (
        lowerings[short_sum](terms, dim + 1)
        if int(longest) <= MOST
        else lowerings[torch.ops.aten.sum](terms, [dim + 1])
    )
    result: TensorBox = total
    return result
