"""Modules of PyTorch that query the device while a program is traced: patterns, meta functions, attention.

Importing this module imports Inductor.

`explanations.elsewhere` patches these modules temporarily, so they are exported as modules.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from pathlib import Path
from types import ModuleType

import torch
from torch import _meta_registrations as meta_registrations
from torch._C import DispatchKey
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition
from torch._inductor import pattern_matcher
from torch._inductor.fx_passes.joint_graph import lazy_init as trace_patterns
from torch._subclasses import fake_tensor

from ..errors import UnsupportedVersionError

__all__ = [
    "DispatchKey",
    "aot_function",
    "default_partition",
    "fake_tensor",
    "flex_attention",
    "let_autograd_know_cuda",
    "meta_registrations",
    "nested_attention",
    "pattern_matcher",
    "priority_order",
    "trace_patterns",
]

_CUDA, _LAZY = 1, 17
"""Values of ``c10::DeviceType``."""


def flex_attention() -> ModuleType:
    """The module of FlexAttention; the package also has an operator of the same name."""
    return importlib.import_module("torch._higher_order_ops.flex_attention")


def nested_attention() -> ModuleType:
    """The module that implements attention of nested tensors in Python."""
    return importlib.import_module("torch.nested._internal.sdpa")


def priority_order() -> list[int]:
    """The values of `torch.nn.attention.SDPBackend` in the order in which PyTorch tries them."""
    return torch._C._get_sdp_priority_order()


@functools.cache
def let_autograd_know_cuda() -> None:
    """Lets autograd record operators on fake CUDA tensors; in a CPU build of torch this would otherwise crash the
    process.

    The effect is permanent.  CUDA builds that find no GPU are able to do this: PyTorch registers a fallback device
    guard if a device type is missing.  CPU builds register nothing for CUDA, so this registers the guard of lazy
    tensors' devices.

    Raises:
        UnsupportedVersionError: this build does not allow it.
    """
    if torch.backends.cuda.is_built():
        return
    try:
        (library,) = Path(torch.__file__).parent.joinpath("lib").glob("libc10.*")
        c10 = ctypes.CDLL(str(library))
        kinds = (ctypes.c_void_p * (_LAZY + 1)).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
        register = c10._ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE
    except (OSError, ValueError, AttributeError) as error:
        raise UnsupportedVersionError(f"this build of PyTorch is not laid out as expected: {error}") from None
    if kinds[_CUDA] is None and kinds[_LAZY] is not None:
        register.argtypes, register.restype = [ctypes.c_int8, ctypes.c_void_p], None
        register(_CUDA, kinds[_LAZY])
        torch._C._ensureCUDADeviceGuardSet()
    if kinds[_CUDA] in (None, kinds[_LAZY]):
        register(_CUDA, None)
        raise UnsupportedVersionError("this build of PyTorch knows no CUDA devices, not even fake ones")
