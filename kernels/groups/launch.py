"""The host side of `behind`: what is left unwritten by products of groups is filled with NaN."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from ..common.launching import launch_kernel
from .device import behind

PROGRAMS, BLOCK = 512, 1024
"""Programs of a launch, and elements that one fills at once."""


def fill_behind(out: Tensor, offsets: Tensor, dim: int) -> None:
    """Fill `out` with NaN from the last offset on.

    Args:
        out: [rows, columns] of a floating-point dtype, whose last dimension is contiguous.
        offsets: integers [groups] on the same device, ascending; without any, all of `out` is filled.
        dim: along which offsets count, 0 or 1.
    """
    if not out.numel():
        return
    if not offsets.numel():
        out.fill_(float("nan"))
        return
    device = torch.cuda.device(out.device) if out.is_cuda else nullcontext()  # Triton uses the current one
    with device:
        launch_kernel(
            behind.fill_behind, out.device, (PROGRAMS,), out, offsets, out.stride(0), offsets.numel(), *out.shape,
            DIM=dim, PROGRAMS=PROGRAMS, BLOCK=BLOCK,
        )  # fmt: skip
