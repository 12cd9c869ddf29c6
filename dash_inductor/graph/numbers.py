"""Numbers that a graph writes into tensors, as the dtypes of these tensors hold them."""

from __future__ import annotations

import torch

from ..upstream.dispatch import disable_current_modes


def rounded(number: float, dtype: torch.dtype) -> float | None:
    """A number as an element of a dtype, converted by ATen; None where the dtype cannot hold it at all.

    For example 2.0 for 2.7 in an integer dtype, and 2.703125 in bfloat16.
    """
    if dtype.is_complex:
        return None
    with disable_current_modes():
        try:
            return float(torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype).item())
        except (RuntimeError, OverflowError):
            return None


def holds_all(dtype: torch.dtype, of: torch.dtype) -> bool:
    """Whether every number of the floating-point dtype `of` is a number of a dtype; no integer dtype has all."""
    if not dtype.is_floating_point:
        return False
    have, want = torch.finfo(dtype), torch.finfo(of)
    return have.eps <= want.eps and have.max >= want.max and have.smallest_normal <= want.smallest_normal
