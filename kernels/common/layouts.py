"""The shapes of the tensors of a call, as operators and as kernels see them, and the layouts of results.

Kernels see [batch, heads, length, head dim].  The operators have these shapes, too, unless the mask is packed
(`model.VarlenLayout`): then they have [tokens, heads, head dim], as PyTorch's packed operators.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...model.attention_spec import AttentionSpec
from ..execution import Run
from .strides import dense_strides


def heads_first(tensors: Sequence[Tensor], spec: AttentionSpec) -> Sequence[Tensor]:
    """Returns the operator's tensors as kernels see them, [batch, heads, length, head dim].

    Packed tensors, [tokens, heads, head dim], become views with batch size 1; others are returned as they are.
    """
    return tensors if spec.mask.varlen_layout is None else [tensor.unsqueeze(0).transpose(1, 2) for tensor in tensors]


def as_given(result: Tensor, spec: AttentionSpec) -> Tensor:
    """Returns a kernel's result in the operator's shape: the inverse of `heads_first`, for one tensor."""
    return result if spec.mask.varlen_layout is None else result.transpose(1, 2).squeeze(0)


def of_operator(numbers: Sequence[int], spec: AttentionSpec) -> tuple[int, ...]:
    """Converts the shape or the strides of a kernel's result to those of the operator's result, see `as_given`."""
    return tuple(numbers) if spec.mask.varlen_layout is None else (numbers[2], numbers[1], numbers[3])


def are_rows_dense(spec: AttentionSpec) -> bool:
    """Returns whether `spec.orders` has the head dimension innermost in every result, as kernels write it."""
    return all(order[-1] == 3 for order in spec.orders)


def kernel_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, with which a kernel writes a result.

    `shape` is [batch, heads, length, head dim]; `order` lists the dimensions from the largest stride to the smallest.
    A kernel writes this order if the head dimension comes last in it; otherwise it writes a contiguous tensor.
    """
    return dense_strides(shape, order if order[-1] == 3 else (0, 1, 2, 3))


def empty_ordered(size: Sequence[int | torch.SymInt], order: Sequence[int], like: Tensor) -> Tensor:
    """Returns an uninitialized dense tensor of `size`, with dtype and device of `like`.

    `order` lists its dimensions from the largest stride to the smallest.
    """
    inverse = [0] * len(order)
    for place, dim in enumerate(order):
        inverse[dim] = place
    return like.new_empty([size[d] for d in order]).permute(inverse)


def in_orders(run: Run, spec: AttentionSpec) -> Run:
    """Wraps `run`: results whose layouts are not those of `spec.orders` are copied to these layouts."""

    def ordered(args: Sequence[Any]) -> tuple[Tensor, ...]:
        results = run(args)
        given = heads_first(results[: len(spec.orders)], spec)
        dense = [as_given(_with_order(*each), spec) for each in zip(given, spec.orders, strict=True)]
        return *dense, *results[len(dense) :]

    return ordered


def _with_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Returns `tensor` if it is dense with this order of dimensions (see `empty_ordered`), else a copy that is."""
    if tensor.stride() == _ordered_strides(tensor.shape, order):
        return tensor
    return empty_ordered(tensor.shape, order, tensor).copy_(tensor)


@functools.lru_cache(maxsize=1024)
def _ordered_strides(size: torch.Size, order: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of the result of `empty_ordered`, which do not depend on dtype or device."""
    return empty_ordered(size, order, torch.empty(0, device="meta")).stride()
