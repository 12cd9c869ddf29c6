"""Allocations and launches of a call, noted once, and made again for other operands of the same shapes.

What a call allocates, which kernels it launches and with which numbers follows from shapes, strides, dtypes and
alignment of its operands.  A `LaunchList` keeps that, so that a later call needs addresses alone, which takes a tenth
of the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...upstream import compat
from ...upstream.cuda import raw_stream
from .launcher import KernelLauncher, launch

Allocated = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides, dtype."""
Argument = int | tuple[int, int]
"""A number, or the number of a tensor and the bytes from its first element: operands come first, then what was
allocated."""


@dataclass(frozen=True)
class LaunchList:
    """What one call does.

    Attributes:
        allocated: tensors, in order.
        launches: kernels with their arguments, in order.
        results: numbers of the allocated tensors that the call returns.
    """

    allocated: tuple[Allocated, ...]
    launches: tuple[tuple[KernelLauncher, tuple[Argument, ...]], ...]
    results: tuple[int, ...]

    def run(self, operands: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Do it for operands that have the key of those of the first call, on the current device."""
        new = [compat.empty_cuda(*each) for each in self.allocated]
        addresses = [tensor.data_ptr() for tensor in (*operands, *new)]
        stream = raw_stream(device.index)
        launch(
            itertools.chain.from_iterable(
                launcher.pack(stream, (), *[a if isinstance(a, int) else addresses[a[0]] + a[1] for a in arguments])
                for launcher, arguments in self.launches
            )
        )
        return [new[number] for number in self.results]


class Notes:
    """Notes of the call that is made for the first time.

    Args:
        operands: the tensors that it is given.
    """

    def __init__(self, operands: Sequence[Tensor]) -> None:
        self._tensors, self._operands = list(operands), len(operands)  # kept, so that no address belongs to two
        self._allocated: list[Allocated] = []
        self._launches: list[tuple[KernelLauncher, tuple[Argument, ...]]] = []
        self._is_complete = True

    def allocate(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor on the current device."""
        tensor = compat.empty_cuda(shape, strides, dtype)
        self._tensors.append(tensor)
        self._allocated.append((shape, strides, dtype))
        return tensor

    def launched(self, launcher: KernelLauncher | None, arguments: Sequence[Tensor | int]) -> None:
        """A kernel was launched; None if it cannot be launched again by its addresses."""
        if launcher is None:
            self.refuse()
            return
        self._launches.append((launcher, tuple(a if isinstance(a, int) else self._placed(a) for a in arguments)))

    def refuse(self) -> None:
        """The call does something else: it has no list."""
        self._is_complete = False

    def list_of(self, results: Sequence[Tensor]) -> LaunchList | None:
        """The list of the call, None if it has done something that is not in it."""
        numbers = {id(tensor): number for number, tensor in enumerate(self._tensors[self._operands :])}
        if not self._is_complete or any(id(result) not in numbers for result in results):
            return None
        return LaunchList(tuple(self._allocated), tuple(self._launches), tuple(numbers[id(r)] for r in results))

    def _placed(self, argument: Tensor) -> Argument:
        address = argument.data_ptr()
        if not address:  # of a tensor without elements
            return 0
        storage = argument.untyped_storage().data_ptr()
        for number, tensor in enumerate(self._tensors):
            if tensor.untyped_storage().data_ptr() == storage:
                return number, address - tensor.data_ptr()
        self.refuse()
        return 0


def key_of(operands: Sequence[Tensor]) -> Hashable:
    """All that a list of launches depends on: shapes, strides, dtypes, alignment, and who shares memory with whom."""
    first: dict[int, tuple[int, int]] = {}
    parts = []
    for number, tensor in enumerate(operands):
        address = tensor.data_ptr()
        owner, start = first.setdefault(tensor.untyped_storage().data_ptr(), (number, address))
        parts.append((tensor.shape, tensor.stride(), tensor.dtype, address % 16, owner, address - start))
    return tuple(parts)


class LaunchLists:
    """The lists of an operator's calls, by key.

    Args:
        most: lists that are kept; shapes that are not used any more go with all others.
    """

    def __init__(self, most: int = 256) -> None:
        self._most, self._lists = most, dict[Hashable, LaunchList]()

    def call(
        self, key: Hashable, operands: Sequence[Tensor], first: Callable[[Notes], Sequence[Tensor]]
    ) -> list[Tensor]:
        """Make a call on the device of its operands: by its list, or by `first`, which notes what it does.

        Args:
            key: all that the call depends on beside its operands.
        """
        device = operands[0].device
        key = key, device.index, key_of(operands)
        with torch.cuda.device(device):
            known = self._lists.get(key)
            if known is not None:
                return known.run(operands, device)
            notes = Notes(operands)
            results = list(first(notes))
            made = notes.list_of(results)
            if made is not None:
                if len(self._lists) >= self._most:
                    self._lists.clear()
                self._lists[key] = made
            return results
