"""Strides of dense tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def dense_strides(size: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """Computes the strides of a dense tensor, in elements.

    Args:
        size: its sizes, integers or sympy expressions.
        order: its dimensions, from the largest stride to the smallest.
    """
    strides: list[Any] = [None] * len(size)
    step: Any = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * size[dim]
    return tuple(strides)
