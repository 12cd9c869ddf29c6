"""Gradients of embeddings: under deterministic algorithms Inductor gets PyTorch's own kernel for them.

Inductor writes such a gradient as an `index_put` that accumulates, and under deterministic algorithms leaves it to a
kernel that adds all rows of an index one after the other: in BERT, whose tokens are nearly all of one type, it takes
more than half as long as the rest of a training step (docs/what-we-know.md).  `aten.embedding_dense_backward` sorts as
well, adds the rows of an index in parts whose order is fixed, and has no atomics; Inductor leaves it as it is where its
decomposition says that it is not to be decomposed, as on XPU.

A table of few rows, as of token types, needs no sorting: the gradient of each row is a sum of all rows of which others
count as zeros, and Inductor computes such sums in one pass, in fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..upstream import seams

aten = torch.ops.aten
FEW = 4
"""Rows of a table whose gradients are sums: Inductor makes one kernel of so many."""


def install(is_active: Callable[[], bool]) -> None:
    """Keep the operator whole on CUDA, in graphs that are traced while `is_active`."""
    from ..upstream.inductor import fallback_handler, lowerings, register_lowering

    decompositions = seams.DECOMPOSITIONS.value()
    overload = aten.embedding_dense_backward.default
    decompose = decompositions[overload]

    @functools.wraps(decompose)
    def keep(grad_output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if grad_output.device.type == "cuda" and torch.version.hip is None and is_active():
            return by_sums(grad_output, *args, **kwargs)
        return decompose(grad_output, *args, **kwargs)

    decompositions[overload] = keep
    if overload not in lowerings:
        register_lowering(overload, type_promotion_kind=None)(fallback_handler(overload))


def by_sums(
    grad_output: torch.Tensor, indices: torch.Tensor, num_weights: Any, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    """`aten.embedding_dense_backward` for a table of 1 to `FEW` rows; NotImplemented for any other.

    Args:
        grad_output: [..., columns], the gradient of the embeddings of `indices`, integers [...].
        num_weights: rows of the table.
        padding_idx: the row that has no gradient, or a negative number.
        scale_grad_by_freq: gradients are divided by the numbers of their indices, which is left to the operator.
    """
    if not isinstance(num_weights, int) or not 0 < num_weights <= FEW or scale_grad_by_freq:
        return NotImplemented
    rows, columns = indices.reshape(-1, 1), grad_output.reshape(indices.numel(), grad_output.shape[-1])
    none = torch.zeros((), dtype=columns.dtype, device=columns.device)
    sums = [
        columns.new_zeros(columns.shape[1]) if row == padding_idx else torch.where(rows == row, columns, none).sum(0)
        for row in range(num_weights)
    ]
    return torch.stack(sums)
