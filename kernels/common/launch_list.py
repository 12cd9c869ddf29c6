"""Records the allocations and launches of a call, and replays them for other operands of the same layout.

Allocations, kernels and integer arguments of a call follow from shapes, strides, dtypes and alignment of its operands.
`LaunchLists` keeps them as `CallLaunches`, so a later call only fills in addresses, which takes a tenth of the host
time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from ...upstream import compat
from ...upstream.cuda import current_device
from .call_launches import Address, Allocated, CallLaunch, CallLaunches
from .launcher import KernelLauncher

Argument = int | Address
"""An integer, or the address of a tensor; a call's operands are numbered first, then its allocations."""

_ALIGNMENT = 128
"""Alignment in bytes of tensors that share an allocation."""


class Notes:
    """Records the allocations and kernel launches of an operator call that is made for the first time.

    Args:
        operands: the tensors that the call is given.
        views: whether kernels may also be given views of operands.
    """

    def __init__(self, operands: Sequence[Tensor], views: bool = True) -> None:
        self._tensors, self._operands = list(operands), len(operands)  # kept, so that no address belongs to two
        self._views = views
        self._allocated: list[Allocated] = []
        self._launches: list[tuple[KernelLauncher, tuple[Argument, ...]]] = []
        self._is_complete = True

    def allocate(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocates a tensor on the current device and records it."""
        tensor = compat.empty_cuda(shape, strides, dtype)
        self._tensors.append(tensor)
        self._allocated.append((shape, strides, dtype))
        return tensor

    def launched(self, launcher: KernelLauncher | None, arguments: Sequence[Tensor | int]) -> None:
        """Records a kernel launch with these arguments.

        `launcher` is None if the kernel cannot be launched again from addresses; then the call is not replayable.
        """
        if launcher is None:
            self.refuse()
            return
        self._launches.append((launcher, tuple(a if isinstance(a, int) else self._placed(a) for a in arguments)))

    def refuse(self) -> None:
        """Marks the call as not replayable, because it does something that is not recorded."""
        self._is_complete = False

    def recorded(self, results: Sequence[Tensor], device: int) -> CallLaunches | None:
        """Returns the allocations and launches of the call, or None if the call is not replayable.

        All allocated tensors that the call does not return share one allocation.

        Args:
            results: the tensors that the call returns.
            device: the index of the device.
        """
        numbers = {id(tensor): number for number, tensor in enumerate(self._tensors) if number >= self._operands}
        if not self._is_complete or any(id(result) not in numbers for result in results):
            return None
        returned = [numbers[id(result)] for result in results]
        places = {number: Address(number) for number in range(self._operands)}
        places |= {number: Address(self._operands + place) for place, number in enumerate(returned)}
        scratch = 0
        for number, allocated in enumerate(self._allocated, self._operands):
            if number not in places:
                places[number] = Address(self._operands + len(returned), scratch)
                scratch += -(-_bytes(*allocated) // _ALIGNMENT) * _ALIGNMENT
        asked = [
            CallLaunch(launcher, (), tuple(a if isinstance(a, int) else places[a.number] + a.offset for a in arguments))
            for launcher, arguments in self._launches
        ]
        made = [self._allocated[number - self._operands] for number in returned]
        made += [((scratch,), (1,), torch.uint8)] if scratch else []
        return CallLaunches(asked, made, len(returned), device)

    def _placed(self, argument: Tensor) -> Argument:
        address = argument.data_ptr()
        if not address:  # of a tensor without elements
            return 0
        for number, tensor in enumerate(self._tensors):
            if tensor is argument:
                return Address(number)
        storage = argument.untyped_storage().data_ptr()
        for number, tensor in enumerate(self._tensors):
            allocated = number >= self._operands
            if (self._views or allocated) and tensor.untyped_storage().data_ptr() == storage:
                return Address(number, address - tensor.data_ptr())
        self.refuse()
        return 0


def _bytes(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> int:
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))) * dtype.itemsize


def key_of(operands: Sequence[Tensor], views: bool = True) -> Hashable:
    """Returns a cache key of everything about the operands that a recorded call depends on.

    That is shapes, strides, dtypes, devices and alignment, and, with `views`, which operands share a storage and at
    which distance.
    """
    if not views:
        return tuple([(*_layout(tensor), tensor.data_ptr() % 16) for tensor in operands])
    first: dict[int, tuple[int, int]] = {}
    parts = []
    for number, tensor in enumerate(operands):
        address = tensor.data_ptr()
        owner, start = first.setdefault(tensor.untyped_storage().data_ptr(), (number, address))
        parts.append((*_layout(tensor), address % 16, owner, address - start))
    return tuple(parts)


def _layout(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class LaunchLists:
    """A cache of an operator's recorded calls, to be replayed for operands with the same layouts.

    Args:
        most: maximal number of recorded calls; when it is reached, all are dropped, so that unused shapes do not
            accumulate.
        views: whether kernels are given views of operands.  Without, computing a key takes less time.
    """

    def __init__(self, most: int = 256, views: bool = True) -> None:
        self._most, self._views, self._recorded = most, views, dict[Hashable, CallLaunches]()

    def call(
        self, key: Hashable, operands: Sequence[Tensor], first: Callable[[Notes], Sequence[Tensor]]
    ) -> list[Tensor]:
        """Makes a call on the device of its operands and returns the results: replays a recorded call, or runs `first`.

        Args:
            key: everything that the call depends on other than its operands.
            first: makes the call and records it in the given `Notes`; returns the results.
        """
        device = operands[0].device
        if current_device() != device.index:
            with torch.cuda.device(device):
                return self.call(key, operands, first)
        key = key, device.index, key_of(operands, self._views)
        known = self._recorded.get(key)
        if known is not None:
            return [*known.run([*map(Tensor.data_ptr, operands)])]
        notes = Notes(operands, self._views)
        results = list(first(notes))
        made = notes.recorded(results, device.index)
        if made is not None:
            if len(self._recorded) >= self._most:
                self._recorded.clear()
            self._recorded[key] = made
        return results
