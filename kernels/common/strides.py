"""Strides of dense tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def dense_strides(size: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """Strides of a dense tensor (sizes are integers or sympy's) with this order of dimensions, largest stride first."""
    strides: list[Any] = [None] * len(size)
    step: Any = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * size[dim]
    return tuple(strides)
