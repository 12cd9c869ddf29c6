"""Tensors as TMA sees them: what it can read, and which rows of them it is shown; and what both launchers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....errors import ArgumentError
from ....model.dropout import Dropout
from ....model.site import DType

DTYPES: dict[torch.dtype, DType] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


Places = tuple[int | None, ...]
"""Which of an operator's extras each tensor of a group is; None for one that is not there."""


def taken(extras: Sequence[Tensor], places: Places) -> list[Any]:
    """The extras at these places, None where there is none."""
    return [None if place is None else extras[place] for place in places]


def addresses_at(extras: Sequence[Tensor], places: Places) -> tuple[int, ...]:
    """The address of the extra at every place, 0 where there is none."""
    return tuple([0 if place is None else extras[place].data_ptr() for place in places])


def check_tokens(q_shape: torch.Size, k_shape: torch.Size) -> None:
    """Raise ArgumentError unless queries and keys may be the tokens of a mask of rows."""
    if q_shape[0] != 1 or q_shape[2] != k_shape[2]:
        raise ArgumentError("query, key", (tuple(q_shape), tuple(k_shape)), "one batch element, with as many of both")


class DropoutArguments(NamedTuple):
    """The dropout of probabilities: `threshold` of all 2**16 sets of random bits drop one.

    Note [Random bits of dropout] in reference_dropout.py defines the bits.  Dropout does not change the log-sum-exp.

    Args:
        seed: int64 [1], from which all bits follow.
        threshold: at least 0, where nothing is dropped, and less than 2**16.
        rescale: the factor of kept probabilities, see `model.dropout.Dropout`.
    """

    seed: Tensor
    threshold: int
    rescale: float

    @staticmethod
    def of(dropout: Dropout | None, extras: Sequence[Tensor]) -> DropoutArguments | None:
        """From the operator's extras, among which is the seed."""
        if dropout is None:
            return None
        return DropoutArguments(extras[dropout.seed.index], dropout.threshold, dropout.rescale)


def readable(tensor: Tensor) -> Tensor:
    """`tensor`, or a contiguous copy where TMA could not read it: it wants 16-byte aligned rows with unit stride."""
    if not tensor.data_ptr() % 16 and has_readable_strides(tensor.shape, tensor.stride()):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def has_readable_strides(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether rows of 16-bit numbers have unit stride, and begin at multiples of 16 bytes if the first one does."""
    *outer, column = strides
    steps = [stride for size, stride in zip(shape, outer, strict=False) if size != 1]
    return column == 1 and all(step > 0 and not step % 8 for step in steps)


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
