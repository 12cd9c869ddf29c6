"""Numbers in tensors: rounding to a dtype, and comparing the ranges of dtypes."""

from __future__ import annotations

import torch

from ..upstream.dispatch import disable_current_modes


def rounded(number: float, dtype: torch.dtype) -> float | None:
    """Return a number converted to a dtype by ATen, as a float; None if the dtype cannot represent it.

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
    """Return whether `dtype` can represent every number of the floating-point dtype `of`; False for integer dtypes."""
    if not dtype.is_floating_point:
        return False
    have, want = torch.finfo(dtype), torch.finfo(of)
    return have.eps <= want.eps and have.max >= want.max and have.smallest_normal <= want.smallest_normal
