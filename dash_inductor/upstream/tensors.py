"""Properties and constructors of tensors that PyTorch has only in C++ or under private names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as without_torch_function

__all__ = ["is_functorch_wrapped", "tensor_without_data", "use_count", "without_torch_function"]


def use_count(tensor: Tensor) -> int:
    """The number of C++ references to a tensor."""
    count: int = Tensor._use_count(tensor)  # type: ignore[attr-defined]
    return count


def is_functorch_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor is a wrapper of functorch, as made by `torch.func.vmap` and `torch.func.grad`."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def tensor_without_data(
    of: type[Tensor], shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Any:
    """Makes a tensor without data of the wrapper subclass `of`, whose `__torch_dispatch__` computes its elements."""
    return Tensor._make_wrapper_subclass(of, shape, strides=strides, dtype=dtype, device=device)
