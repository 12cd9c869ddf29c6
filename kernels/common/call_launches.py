"""The allocations and kernel launches of a call, prepared once and repeated for any addresses of its tensors.

What a call allocates and how it launches kernels follow from the layouts of its tensors; only the addresses differ from
call to call, because the caching allocator returns whatever block is free.  So arguments hold an `Address` in place of
a pointer, and the memory that the driver reads is packed once.  Later calls write the new addresses into it, a few
words per kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...upstream import compat
from ...upstream.cuda import raw_stream
from .arguments import flat
from .launcher import KernelLauncher, Launch, is_hooked, launch, launch_unhooked

Allocated = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor that a call allocates."""


@dataclass(frozen=True, slots=True)
class Address:
    """A placeholder for a pointer: the address of the call's tensor `number`, plus `offset` bytes."""

    number: int
    offset: int = 0

    def __add__(self, more: int) -> Address:
        return Address(self.number, self.offset + more)


class CallLaunch(NamedTuple):
    """A kernel launch of a call: the arguments of `KernelLauncher.pack`, with `Address` in place of pointers."""

    kernel: KernelLauncher
    descriptors: tuple[Address, ...]
    arguments: tuple[Any, ...]


def named_arguments(function: Any, **values: Any) -> tuple[Any, ...]:
    """Returns arguments for `CallLaunch`, given by name, in the order of the kernel's parameters.

    Args:
        function: the kernel; the names of its TMA descriptors end in "_desc", those of its constants are in capitals.

    Raises:
        ArgumentError: the names are not those of all other parameters.
    """
    names = [name for name in function.arg_names if not name.endswith("_desc") and not name.isupper()]
    if values.keys() != {*names}:
        raise ArgumentError("values", sorted(values), f"values of {sorted(names)}")
    return tuple([values[name] for name in names])


def unknown_addresses(count: int) -> list[Address]:
    """Returns an `Address` (placeholder) for each of `count` tensors of a call, in their order."""
    return [Address(number) for number in range(count)]


class _Block(NamedTuple):
    """Packed launches whose memory is used by one call at a time.

    Attributes:
        streams: for each launch the words of its memory, and the index of the stream among them.
        moved: words, index of an address among them, and number and offset of the `Address` that it holds.
        encoded: launches with descriptors that only the driver can write: kernel, launch, descriptor number and
            `Address`.
    """

    launches: tuple[Launch, ...]
    streams: list[tuple[memoryview, int]]
    moved: list[tuple[memoryview, int, int, int]]
    encoded: list[tuple[KernelLauncher, Launch, int, Address]]

    def move(self, stream: int, addresses: Sequence[int]) -> None:
        for words, place in self.streams:
            words[place] = stream
        for words, place, number, offset in self.moved:
            words[place] = addresses[number] + offset
        for kernel, made, number, address in self.encoded:
            kernel.encode(made, number, addresses[address.number] + address.offset)


class CallLaunches:
    """The allocations and launches of a call on one device, for any addresses of its operands.

    Args:
        asked: the launches in order.  Their addresses number the operands first, then `allocated`; those of descriptors
            are multiples of 16 bytes in every call.
        allocated: the tensors that every call allocates, results first.
        results: how many of the allocated tensors the call returns; the others only live until the kernels are
            launched.
        device: the index of the device.
    """

    def __init__(
        self, asked: Sequence[CallLaunch], allocated: Sequence[Allocated] = (), results: int = 0, device: int = 0
    ) -> None:
        self._asked, self._allocated, self._results, self._device = tuple(asked), tuple(allocated), results, device
        self._free: list[_Block] = []  # one per thread that has run the call concurrently

    def run(self, addresses: list[int]) -> tuple[Tensor, ...]:
        """Allocates tensors and launches the kernels on the current stream; returns the results.

        The device must be the current one.

        Args:
            addresses: the addresses of the operands; those of the allocated tensors are appended to this list.

        Raises:
            LaunchError: the driver returned an error.
        """
        made, empty = [], compat.empty_cuda
        for facts in self._allocated:
            tensor = empty(*facts)
            made.append(tensor)
            addresses.append(tensor.data_ptr())
        self.launch(raw_stream(self._device), addresses)
        return tuple(made[: self._results])

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        """Launches the kernels on a raw stream, for operands and allocations with these addresses.

        Raises:
            LaunchError: the driver returned an error.
        """
        if is_hooked():  # a profiler's hook receives the arguments of every launch
            launch(self.packed(stream, addresses))
            return
        try:
            block = self._free.pop()
        except IndexError:
            block = self._block(stream, addresses)
        else:
            block.move(stream, addresses)
        launch_unhooked(block.launches)  # the driver has copied what it needs
        self._free.append(block)

    def packed(self, stream: int, addresses: Sequence[int]) -> tuple[Launch, ...]:
        """Returns the call's kernel launches for these tensor addresses, packed into memory that no other call uses."""
        return tuple(itertools.chain.from_iterable(self._pack(asked, stream, addresses) for asked in self._asked))

    @staticmethod
    def _pack(asked: CallLaunch, stream: int, addresses: Sequence[int]) -> tuple[Launch, ...]:
        descriptors = [addresses[each.number] + each.offset for each in asked.descriptors]
        return asked.kernel.pack(stream, descriptors, *_filled_in(asked.arguments, addresses))

    def _block(self, stream: int, addresses: Sequence[int]) -> _Block:
        block = _Block((), [], [], [])
        launches: list[Launch] = []
        for asked in self._asked:
            for made in self._pack(asked, stream, addresses):  # none where the grid is empty
                launches.append(made)
                words, places = memoryview(made.memory).cast("B").cast("Q"), asked.kernel.places(made)
                block.streams.append((words, places.stream))
                for number, (place, address) in enumerate(zip(places.descriptors, asked.descriptors, strict=True)):
                    if asked.kernel.is_moved(number):
                        block.moved.append((words, place, address.number, address.offset))
                    else:
                        block.encoded.append((asked.kernel, made, number, address))
                arguments = itertools.compress(flat(asked.arguments), asked.kernel.are_arguments)
                block.moved.extend(
                    (words, place, argument.number, argument.offset)
                    for place, argument in zip(places.arguments, arguments, strict=True)
                    if isinstance(argument, Address)
                )
        return block._replace(launches=tuple(launches))


def _filled_in(arguments: tuple[Any, ...], addresses: Sequence[int]) -> tuple[Any, ...]:
    """Replaces each `Address` among the arguments by the integer that it stands for."""
    return tuple([_with(argument, addresses) for argument in arguments])


def _with(argument: Any, addresses: Sequence[int]) -> Any:
    if isinstance(argument, tuple):
        return _filled_in(argument, addresses)
    return addresses[argument.number] + argument.offset if isinstance(argument, Address) else argument
