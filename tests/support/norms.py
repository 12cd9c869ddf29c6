"""A kernel that writes fp32 in one loop and reads it in the next, beside tensors of 16 bits."""

from __future__ import annotations

from torch import Tensor


def gradient_of_norm(expert: Tensor, places: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What the gradient of an RMSNorm in fp32 is, where it comes from two rows for each, and the gradient itself.

    Args:
        expert, x: of 16 bits [rows, columns].
        places: int64 [rows, 2], of rows of `expert`.
        weight: of 16 bits [columns].
    """
    gradient = (expert[places[:, 0]] + expert[places[:, 1]]).float()
    total = (gradient * weight * x).sum(1, keepdim=True)
    return gradient, x - (gradient * weight - total * x).to(x.dtype)
