"""PyTorch's classes of the operators that graph nodes call, its dispatch modes, and tensor subclasses."""

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
    """Whether a tensor subclass has its own `__torch_dispatch__`; parameters do not."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
