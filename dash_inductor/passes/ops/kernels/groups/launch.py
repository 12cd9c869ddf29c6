"""Launches `device.behind`, which fills with NaN what a grouped matmul leaves unwritten."""

from __future__ import annotations

from torch import Tensor

from .....kernels.common.launch_list import LaunchLists, Notes
from .....kernels.common.launching import launch_kernel
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
    operands = out, offsets

    def first(notes: Notes) -> tuple[()]:
        arguments = *operands, out.stride(0), offsets.numel(), *out.shape
        launched = launch_kernel(
            behind.fill_behind, out.device, (PROGRAMS,), *arguments, DIM=dim, PROGRAMS=PROGRAMS, BLOCK=BLOCK
        )
        notes.launched(launched, arguments)
        return ()

    if out.is_cuda:
        CALLS.call(dim, operands, first)
    else:
        first(Notes(operands))


CALLS = LaunchLists(views=False)
"""The calls that have filled what is behind groups."""
