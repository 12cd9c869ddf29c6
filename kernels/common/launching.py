"""Launches plain Triton kernels on a device, which must be the current one, or on the CPU in Triton's interpreter."""

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
    warps: int = 4,
    debug: bool = False,
    **constants: Any,
) -> KernelLauncher | None:
    """Launches a plain Triton kernel on `device`, which must be the current one; on the CPU in Triton's interpreter.

    The first launch with arguments of these kinds (dtype, alignment, range) goes through Triton, which chooses a
    specialisation of the kernel; later launches reuse its choice through a `KernelLauncher`.

    Args:
        warps: the number of warps per program.
        debug: whether the kernel's device assertions are checked.
        constants: compile-time constants by name.

    Returns:
        A launcher that launches the kernel again; None in the interpreter, or where a hook of Triton replaces
        compilation.
    """
    options: dict[str, Any] = {"num_warps": warps, "debug": True} if debug else {"num_warps": warps}
    if device.type != "cuda":
        kernel[grid](*arguments, **constants, **options)
        return None
    kinds = tuple(_kind(argument) for argument in arguments)
    key = kernel, device.index, grid, kinds, warps, tuple(constants.values())
    launched = _LAUNCHERS.get(key)
    if launched is not None:
        stream = raw_stream(device.index)
        launch(launched.pack(stream, (), *(a if isinstance(a, int) else a.data_ptr() for a in arguments)))
        return launched
    if debug:
        options["sanitize_overflow"] = False  # each of its checks is a barrier
    compiled = kernel[grid](*arguments, **constants, **options)
    if compiled is None:
        return None
    if len(_LAUNCHERS) >= 1024:  # shapes that are not used any more
        _LAUNCHERS.clear()
    made = _LAUNCHERS[key] = KernelLauncher(compiled, grid)
    return made


_LAUNCHERS: dict[Any, KernelLauncher] = {}
"""Launchers by kernel, device, grid, kinds of arguments, warps and constants."""


def _kind(argument: Tensor | int) -> tuple[Any, ...]:
    """Returns everything about an argument that Triton specialises on."""
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return argument.dtype, argument.data_ptr() % 16 == 0
