"""Launches plain Triton kernels on a tensor's device, which is the current one, or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...upstream.cuda import raw_stream
from .launcher import KernelLauncher, launch


def launch_kernel(
    kernel: Any,
    device: torch.device,
    grid: tuple[int, ...],
    *arguments: Tensor | int,
    debug: bool = False,
    **constants: Any,
) -> KernelLauncher | None:
    """Launch a kernel with four warps.

    Triton chooses among the versions of a kernel at its first launch with such arguments; later ones, which a training
    step begins with, go by what it chose.

    Args:
        debug: whether assertions of the kernel are checked on the device.
        constants: compile-time constants, by their names.

    Returns:
        What launches it again, None in the interpreter, and where a hook of Triton's takes the place of compiling.
    """
    options: dict[str, Any] = {"num_warps": 4, "debug": True} if debug else {"num_warps": 4}
    if device.type != "cuda":
        kernel[grid](*arguments, **constants, **options)
        return None
    kinds = tuple(_kind(argument) for argument in arguments)
    key = kernel, device.index, grid, kinds, tuple(constants.values())
    launched = _LAUNCHERS.get(key)
    if launched is not None:
        stream = raw_stream(device.index)
        launch(launched.pack(stream, (), *(a if isinstance(a, int) else a.data_ptr() for a in arguments)))
        return launched
    compiled = kernel[grid](*arguments, **constants, **options)
    if compiled is None:
        return None
    if len(_LAUNCHERS) >= 1024:  # shapes that are not used any more
        _LAUNCHERS.clear()
    made = _LAUNCHERS[key] = KernelLauncher(compiled, grid)
    return made


_LAUNCHERS: dict[Any, KernelLauncher] = {}
"""Launchers by kernel, device, grid, kinds of arguments and constants."""


def _kind(argument: Tensor | int) -> tuple[Any, ...]:
    """All that Triton's choice of a version depends on."""
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return argument.dtype, argument.data_ptr() % 16 == 0
