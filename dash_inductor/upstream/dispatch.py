"""Operators as nodes of graphs call them, PyTorch's dispatcher, and the modes and subclasses of tensors it knows."""

from __future__ import annotations

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
    "is_traceable_wrapper_subclass",
    "mode_count",
    "mode_stack",
    "transform_subclass",
]
