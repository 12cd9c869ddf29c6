"""Lowers `band_sum`, a product with banded matrices, to a pointwise kernel for few terms, or a reduction for many.

The kernel computes its operands where it reads them.  If the sum consisted of several graph operators, Inductor would
write the operands, and the several times larger products, to memory as soon as they exceeded its limits of reads or
operations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....upstream.inductor import Pointwise, TensorBox, lowerings, ops, register_lowering
from ..operators.banded_matmul import band_sum
from ..operators.unrolled_reductions import MOST


def register() -> None:
    """Registers this module's lowering of `dash_inductor::band_sum` with Inductor."""
    register_lowering(band_sum, type_promotion_kind=None)(_sum)


def _sum(tensor: TensorBox, begins: Sequence[TensorBox], weights: Sequence[TensorBox], dim: int) -> TensorBox:
    """Lowers the operator; see `operators.banded_matmul` for the arguments."""
    size, dtype, load = tensor.get_size(), weights[0].get_dtype(), tensor.make_loader()
    loads = [(begin.make_loader(), weight.make_loader()) for begin, weight in zip(begins, weights, strict=True)]
    longest, rows = zip(*(weight.get_size() for weight in weights), strict=True)
    behind = dim + len(rows)

    def value(before: Sequence[Any], positions: Sequence[Any], after: Sequence[Any]) -> Any:
        return ops.to_dtype(load([*before, *positions, *after]), dtype)

    def term(axis: int, row: Any, place: Any, inner: Callable[[Any], Any]) -> Any:
        begin, weight = loads[axis]
        number = ops.add(begin([row]), ops.index_expr(place, torch.int32))
        position = ops.indirect_indexing(number, size[dim + axis], check=False, wrap_neg=False)
        by, zero = weight([place, row]), ops.constant(0.0, dtype)
        return ops.where(ops.ne(by, zero), ops.mul(by, inner(position)), zero)

    def total(index: Sequence[Any], positions: tuple[Any, ...] = ()) -> Any:
        axis = len(positions)
        if axis == len(rows):
            return value(index[:dim], positions, index[behind:])
        terms = [
            term(axis, index[dim + axis], place, lambda position: total(index, (*positions, position)))
            for place in range(int(longest[axis]))
        ]
        return functools.reduce(ops.add, terms)

    def part(index: Sequence[Any]) -> Any:
        row, place = index[dim : dim + 2]
        return term(0, row, place, lambda position: value(index[:dim], [position], index[dim + 2 :]))

    pointwise = functools.partial(Pointwise.create, device=tensor.get_device(), dtype=dtype)
    if math.prod(map(int, longest)) <= MOST:
        result: TensorBox = pointwise(inner_fn=total, ranges=[*size[:dim], *rows, *size[behind:]])
        return result
    assert len(rows) == 1
    parts = pointwise(inner_fn=part, ranges=[*size[:dim], rows[0], longest[0], *size[behind:]])
    result = lowerings[torch.ops.aten.sum](parts, [dim + 1])
    return result
