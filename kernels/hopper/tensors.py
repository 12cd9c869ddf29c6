"""Tensors as TMA sees them: what it can read, and which rows of them it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...model.site import DType

DTYPES: dict[torch.dtype, DType] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def readable(tensor: Tensor) -> Tensor:
    """`tensor`, or a contiguous copy where TMA could not read it: it wants 16-byte aligned rows with unit stride."""
    b, h, row, column = tensor.stride()
    if not ((b | h | row) % 8 or b < 1 or h < 1 or row < 1 or column != 1 or tensor.data_ptr() % 16):
        return tensor
    outer = zip(tensor.shape, (b, h, row), strict=False)
    aligned = column == 1 and not tensor.data_ptr() % 16
    if aligned and all(size == 1 or (stride > 0 and not stride % 8) for size, stride in outer):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class SeenRows(NamedTuple):
    """The rows of q, do, k or v that take part, as TMA sees them; what it reads outside a descriptor is zero.

    Args:
        descriptor: shape and strides.
        skipped: bytes of a head before the first of them.
    """

    descriptor: tuple[list[int], list[int]]
    skipped: int

    @staticmethod
    def of(shape: Sequence[int], strides: Sequence[int], first: int, end: int) -> SeenRows:
        """Rows ``first .. end - 1``; where there are none nothing is walked, but a descriptor has at least one."""
        if end <= first:
            first, end = 0, 1
        return SeenRows(describe((*shape[:2], end - first, shape[3]), strides), 2 * first * strides[2])


def describe(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Shape and strides for TMA: a dimension of size 1 needs a stride too, of a multiple of 16 bytes."""
    return list(shape), [8 if size == 1 else stride for size, stride in zip(shape[:3], strides, strict=False)] + [1]
