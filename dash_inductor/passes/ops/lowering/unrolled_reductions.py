"""Lowers `short_sum`, a sum over a short dimension, to a pointwise kernel with unrolled additions.

Inductor itself does so for reductions of fewer than eight terms.

Separate additions in the graph would not have this effect: Inductor writes an intermediate result to memory once it has
read eight tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....upstream.inductor import Pointwise, TensorBox, ops, register_lowering
from ..operators.unrolled_reductions import short_sum


def register() -> None:
    """Registers this module's lowering of `dash_inductor::short_sum` with Inductor."""
    register_lowering(short_sum, type_promotion_kind=None)(_sum)


def _sum(tensor: TensorBox, dim: int) -> TensorBox:
    """Lowers the operator; see `operators.unrolled_reductions` for the arguments."""
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
