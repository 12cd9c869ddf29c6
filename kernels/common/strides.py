"""Strides of dense tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def dense_strides(size: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """Computes the strides of a dense tensor from its sizes (integers or sympy) and dimension order, largest stride
    first.
    """
    strides: list[Any] = [None] * len(size)
    step: Any = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * size[dim]
    return tuple(strides)
