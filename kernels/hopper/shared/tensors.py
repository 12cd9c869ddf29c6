"""Tensor checks and TMA descriptions that both launchers share."""

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
"""For each tensor of a group its index in the operator's extras, None if it is absent."""


def taken(extras: Sequence[Tensor], places: Places) -> list[Any]:
    """Returns the extras at these indices, None for None."""
    return [None if place is None else extras[place] for place in places]


def addresses_at(extras: Sequence[Tensor], places: Places) -> tuple[int, ...]:
    """Returns the addresses of the extras at these indices, 0 for None."""
    return tuple([0 if place is None else extras[place].data_ptr() for place in places])


def check_tokens(q_shape: torch.Size, k_shape: torch.Size) -> None:
    """Raises ArgumentError unless queries and keys have the shapes of a varlen layout: batch 1 and equal lengths."""
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
        """Takes the seed from the operator's extras; returns None without dropout."""
        if dropout is None:
            return None
        return DropoutArguments(extras[dropout.seed.index], dropout.threshold, dropout.rescale)


def readable(tensor: Tensor) -> Tensor:
    """Returns `tensor`, or a contiguous copy if TMA cannot read it: rows must be 16-byte aligned, with unit stride."""
    if not tensor.data_ptr() % 16 and has_readable_strides(tensor.shape, tensor.stride()):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def has_readable_strides(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether rows of 16-bit elements have unit stride and strides between them are multiples of 16 bytes."""
    *outer, column = strides
    steps = [stride for size, stride in zip(shape, outer, strict=False) if size != 1]
    return column == 1 and all(step > 0 and not step % 8 for step in steps)


class SeenRows(NamedTuple):
    """The rows of q, do, k or v that take part in attention, as a TMA descriptor; TMA reads zeros outside of it.

    Args:
        descriptor: shape and strides, in elements.
        skipped: byte offset of the first of these rows within a head.
    """

    descriptor: tuple[list[int], list[int]]
    skipped: int

    @staticmethod
    def of(shape: Sequence[int], strides: Sequence[int], first: int, end: int) -> SeenRows:
        """Returns the rows ``first .. end - 1``; if empty, a one-row descriptor that is never read."""
        if end <= first:
            first, end = 0, 1
        return SeenRows(describe((*shape[:2], end - first, shape[3]), strides), 2 * first * strides[2])


def describe(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns shape and strides for TMA, which also needs a stride of a multiple of 16 bytes for dimensions of size
    1.
    """
    return list(shape), [8 if size == 1 else stride for size, stride in zip(shape[:3], strides, strict=False)] + [1]
