"""Lowers `short_sum` to a pointwise kernel that adds, as Inductor unrolls reductions of fewer than eight terms.

Additions of a graph would not do: Inductor writes what it has once it has read eight tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....upstream.inductor import Pointwise, TensorBox, ops, register_lowering
from ..operators.unrolled_reductions import short_sum


def register() -> None:
    register_lowering(short_sum, type_promotion_kind=None)(_sum)


def _sum(tensor: TensorBox, dim: int) -> TensorBox:
    """Shapes and meaning as in `operators.unrolled_reductions`."""
    size, dtype, load = [*tensor.get_size()], tensor.get_dtype(), tensor.make_loader()
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    def total(index: Sequence[Any]) -> Any:
        terms = [ops.to_dtype(load([*index[:dim], place, *index[dim:]]), wide) for place in range(int(size[dim]))]
        found = terms[0]
        for term in terms[1:]:
            found = ops.add(found, term)
        return ops.to_dtype(found, dtype)

    ranges = [*size[:dim], *size[dim + 1 :]]
    result: TensorBox = Pointwise.create(device=tensor.get_device(), dtype=dtype, inner_fn=total, ranges=ranges)
    return result
