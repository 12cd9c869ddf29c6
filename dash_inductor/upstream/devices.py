"""Parts of PyTorch that go by the device while it traces: patterns, formulas of shapes, attention.  Imports Inductor.

`explanations.elsewhere` replaces parts of these modules for a time, so that they are given as modules.
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
"""``c10::DeviceType``."""


def flex_attention() -> ModuleType:
    """The module of FlexAttention; an operator beside it has the same name."""
    return importlib.import_module("torch._higher_order_ops.flex_attention")


def nested_attention() -> ModuleType:
    """The module of the attention of nested tensors, which is written in Python."""
    return importlib.import_module("torch.nested._internal.sdpa")


def priority_order() -> list[int]:
    """Values of `torch.nn.attention.SDPBackend`, from the first kernel of attention that PyTorch tries to the last."""
    return torch._C._get_sdp_priority_order()


@functools.cache
def let_autograd_know_cuda() -> None:
    """Let autograd record operators of fake CUDA tensors, for good; a build for the CPU would end the process.

    PyTorch has what is needed for builds for CUDA that find no GPU, and puts it in place when it sees a kind of devices
    that the machine lacks.  In a build for the CPU nothing is in its place, so we put such a kind there: the devices of
    lazy tensors.

    Raises:
        UnsupportedVersionError: this build cannot do so.
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
