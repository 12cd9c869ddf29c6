"""Tensors as PyTorch's C++ holds them."""

from __future__ import annotations

import torch
from torch import Tensor


def use_count(tensor: Tensor) -> int:
    """How many references C++ has to a tensor."""
    count: int = Tensor._use_count(tensor)  # type: ignore[attr-defined]
    return count


def is_functorch_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor stands for others, as `torch.func.vmap` and `torch.func.grad` make them."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
