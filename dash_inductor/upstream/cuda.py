"""Private functions of PyTorch for CUDA: fast access to the current device and stream, and a query for TunableOp."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

__all__ = ["current_device", "has_tunable_op", "raw_stream"]


def _without_cuda(*_: object) -> NoReturn:
    raise RuntimeError("this build of torch has no CUDA")


current_device: Callable[[], int]
"""Returns the index of the current device."""
raw_stream: Callable[[int], int]
"""Returns the driver's handle of the current stream of a device, given by its index."""
try:
    current_device, raw_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
except AttributeError:  # the CPU build
    current_device = raw_stream = _without_cuda


def has_tunable_op() -> bool:
    """Whether this build of torch has TunableOp; in builds without it, `torch.cuda.tunable` raises."""
    return hasattr(torch._C, "_cuda_tunableop_is_enabled")
