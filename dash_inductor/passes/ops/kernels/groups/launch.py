"""Launches `device.behind`, which writes NaN to the part of a grouped matmul's result that ATen leaves unwritten."""

from __future__ import annotations

from torch import Tensor

from .....kernels.common.launch_list import LaunchLists, Notes
from .....kernels.common.launching import launch_kernel
from .device import behind

PROGRAMS, BLOCK = 512, 1024
"""The number of programs of a launch, and of elements that a program fills at once."""


def fill_behind(out: Tensor, offsets: Tensor, dim: int) -> None:
    """Fills the rows (or columns) of a grouped matmul's result from the last group's end on with NaN, in place.

    Args:
        out: [rows, columns], floating point, with a contiguous last dimension.
        offsets: integers [groups] on the same device, ascending: the end of each group; if empty, all of `out` is
            filled.
        dim: the dimension to which offsets refer, 0 or 1.
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
"""The captured launches of these fills."""
