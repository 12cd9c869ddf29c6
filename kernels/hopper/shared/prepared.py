"""Builds the launcher of a call once for given tensor layouts, and runs it for tensors at any addresses.

Tensors that TMA cannot read are copied before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....model.attention_spec import AttentionSpec
from ....upstream.cuda import current_device
from ...common.call_launches import Address, unknown_addresses
from ...execution import Run
from .tensors import Places, has_readable_strides, readable

Launch = Callable[[list[int]], Sequence[Tensor]]
"""A function (addresses of tensors, then of extras) -> results, which launches on the current device; it may append to
the addresses."""
Make = Callable[[Sequence[Tensor], Sequence[Tensor]], Launch]
"""A function (tensors, extras) -> what launches for tensors with these layouts, all of which TMA can read."""


def used_extras(places: Places | None, spec: AttentionSpec) -> list[int]:
    """Returns the indices of the extras that the kernels read: first the mask's tensors, then the optional operands.

    Args:
        places: the indices of the tensors of a mask that is data; None for a band alone.
    """
    return [*(i for i in places or () if i is not None), *(part.operand.index for part in spec.given.values())]


def numbered(tensors: int, used: Sequence[int], others: int) -> tuple[list[Address], dict[int, Address], list[Address]]:
    """Returns placeholders for the addresses of a launch: for tensors, for the `used` extras, and for further buffers.

    Args:
        tensors: the number of the call's tensors.
        used: the indices of the extras that the kernels read.
        others: the number of addresses that follow: results, workspace, timestamps.

    Returns:
        The addresses of the tensors; those of the extras, by index; those of the others.
    """
    known = unknown_addresses(tensors + len(used) + others)
    return known[:tensors], dict(zip(used, known[tensors:], strict=False)), known[tensors + len(used) :]


def for_any_addresses(
    tensors: Sequence[Tensor], extras: Sequence[Tensor], read: int, used: Sequence[int], aligned: int, make: Make
) -> Run:
    """Returns a function that runs calls with tensors of these layouts, at any addresses.

    Tensors that TMA cannot read, because they are unaligned or have unsuitable strides, are copied in every call.

    Args:
        tensors: the tensors of the call, on the device on which the kernels are launched.
        extras: the operator's extras.
        read: how many tensors, from the first, TMA reads.
        used: the indices of the extras that the kernels read, as `used_extras` returns them.
        aligned: how many extras of `used`, from the first, must be aligned to 16 bytes.
        make: builds the launcher for tensors that TMA can read.

    Raises:
        ArgumentError: `make` rejects the tensors, or a head dim is not a multiple of 8 (`readable`).
    """
    device, count, checked, unchecked = tensors[0].device, len(tensors), used[:aligned], used[aligned:]
    index = device.index
    launches: dict[tuple[bool, ...], Launch] = {}  # by which tensors are copied

    def launch_of(given: Sequence[Tensor], extras: Sequence[Tensor], copied: tuple[bool, ...]) -> Launch:
        if copied not in launches:
            with torch.cuda.device(device):  # into which kernels are loaded
                launches[copied] = make(given, extras)
        return launches[copied]

    def run_with_copies(args: Sequence[Any]) -> Sequence[Tensor]:
        if current_device() != index:
            with torch.cuda.device(device):
                return run_with_copies(args)
        original, extras = args[:read], args[count]
        copies = [readable(tensor) for tensor in original]
        given = *copies, *args[read:count]
        launch = launch_of(given, extras, tuple(a is not b for a, b in zip(copies, original, strict=True)))
        data = [extras[i].clone() if extras[i].data_ptr() % 16 else extras[i] for i in checked]
        return launch([tensor.data_ptr() for tensor in (*given, *data, *(extras[i] for i in unchecked))])

    if not all(has_readable_strides(tensor.shape, tensor.stride()) for tensor in tensors[:read]):
        return run_with_copies
    launch_as_given = launch_of(tensors, extras, (False,) * read)

    def run(args: Sequence[Any]) -> Sequence[Tensor]:  # loops, because this is called most often
        addresses, bits, extras = [], 0, args[count]
        for tensor in args[:count]:
            address = tensor.data_ptr()
            addresses.append(address)
            bits |= address
        for i in checked:
            address = extras[i].data_ptr()
            addresses.append(address)
            bits |= address
        if bits % 16 or current_device() != index:
            return run_with_copies(args)
        for i in unchecked:
            addresses.append(extras[i].data_ptr())  # a comprehension takes longer
        return launch_as_given(addresses)

    return run
