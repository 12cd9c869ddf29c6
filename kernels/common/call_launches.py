"""Cached launches of a call: packed once, then patched with the tensor addresses of every later call.

Launch arguments follow from the layouts of a call's tensors; only the addresses differ from call to call, because the
caching allocator returns whatever block is free.  So arguments hold an `Address` in place of a pointer, and the memory
that the driver reads is packed once.  Later calls write the new addresses into it, a few words per kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .arguments import flat
from .launcher import KernelLauncher, Launch, is_hooked, launch


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


def unknown_addresses(count: int) -> list[Address]:
    """Returns one `Address` per tensor of a call, in their order."""
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
    """The launches of a call, for any addresses of its tensors.

    Args:
        asked: the launches in order.  Addresses of descriptors are multiples of 16 bytes in every call.
    """

    def __init__(self, asked: Sequence[CallLaunch]) -> None:
        self._asked = tuple(asked)
        self._free: list[_Block] = []  # one per thread that has run the call concurrently

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        """Launches the kernels on a raw stream, for tensors with these addresses, on the device they were packed for.

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
        launch(block.launches)  # the driver has copied what it needs
        self._free.append(block)

    def packed(self, stream: int, addresses: Sequence[int]) -> tuple[Launch, ...]:
        """Packs the launches with these addresses into memory of their own."""
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
