"""Operators as nodes of graphs call them, PyTorch's dispatcher, and the modes and subclasses of tensors it knows."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C import _len_torch_dispatch_stack as mode_count
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as mode_stack
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

__all__ = [
    "DispatchMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "disable_current_modes",
    "has_own_dispatch",
    "is_traceable_wrapper_subclass",
    "mode_count",
    "mode_stack",
    "transform_subclass",
]


def has_own_dispatch(kind: type[Any]) -> bool:
    """Whether a class of tensors implements operators itself; parameters of all kinds leave them to PyTorch."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
