"""Launches Triton's compiled kernels with the CUDA driver, from arguments that are packed once.

Triton's own launcher unpacks a kernel's arguments and encodes its TMA descriptors on every launch, which takes longer
than the driver's launch itself.  `KernelLauncher.pack` does that work once, and `launch` passes the result to the
driver any number of times; `call_launches` patches addresses in between.  The layout of a kernel's arguments in memory
is read from its PTX.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import DashError, LaunchError
from ...upstream.triton_launch import TMA_DTYPE_DEVICE_TO_HOST, knobs
from .arguments import flat

_PARAMETER = re.compile(r"\.param (?:\.align (\d+) )?\.(\w+)[^,\n]*?(?:\[(\d+)\])?\s*(?:,|$)", re.MULTILINE)
_CODES = {"u64": "q", "u32": "i", "u16": "h", "u8": "b", "f32": "f", "f64": "d"}
_SCRATCH = 2
"""Number of trailing scratch memory pointers that Triton adds to every kernel; our kernels do not use them."""

_CONFIG, _STREAM = "7I4xQQI4x", 32  # CUlaunchConfig, and where the stream is in it
_ATTRIBUTE = "=I4xi60x"  # CUlaunchAttribute whose value is an int
_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6  # CUlaunchAttributeID
_NO_INTERLEAVE, _L2_PROMOTION_128B, _FILL_ZEROS = 0, 2, 0
_MAP, _MAP_BYTES, _MAP_ALIGNMENT = "map", 128, 64  # CUtensorMap
_ADDRESS_ALIGNMENT = 16
"""Alignment of the address in a descriptor, in bytes."""
_ADDRESS_BYTES = 8
_DESCRIPTOR = f"=Q{_MAP_BYTES - _ADDRESS_BYTES}s"
_TRIED = 0x5555_5555_5550, 0x2AAA_AAAA_AAA0
"""Two aligned addresses that differ in every bit of a 47-bit address above the alignment."""
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT

Described = tuple[Sequence[int], Sequence[int]]
"""Shape and strides of a TMA descriptor, in elements."""


class Places(NamedTuple):
    """Indices, in 8-byte words of a launch's memory, of the fields that may change from call to call.

    Attributes:
        stream: index of the stream.
        descriptors: index of the address in each descriptor.
        arguments: index of each other argument, flattened and without compile-time constants.
    """

    stream: int
    descriptors: Sequence[int]
    arguments: Sequence[int]


class Launch(NamedTuple):
    """A kernel launch whose configuration and arguments are packed in memory, as the CUDA driver reads them.

    Attributes:
        config, parameters: addresses of the launch configuration and of the array of pointers to arguments.
        function: the driver's handle of the kernel.
        kernel, stream, arguments: passed to the hooks of a profiler.
        memory: the buffer that `config` and `parameters` point into.
    """

    config: int
    function: int
    parameters: int
    kernel: KernelLauncher
    stream: int
    arguments: tuple[Any, ...]
    memory: Any


class KernelLauncher:
    """Packs launches of a compiled kernel whose first arguments are TMA descriptors of fixed shapes and strides.

    Attributes:
        are_arguments: for each of the other arguments, flattened, whether it is not a compile-time constant.

    Args:
        compiled: Triton's compiled kernel; it is loaded into the current device.
        grid: number of programs, or the numbers along up to three axes.
        descriptors: shape and strides of each leading descriptor argument, in elements.

    Raises:
        DashError: the kernel's PTX parameters are not those of its signature, or it needs clusters or scratch memory.
    """

    def __init__(self, compiled: Any, grid: int | tuple[int, ...], descriptors: Sequence[Described] = ()) -> None:
        metadata = compiled.metadata
        if metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
            raise DashError(f"{metadata.name} needs clusters or scratch memory, with which it is not launched")
        compiled.run  # noqa: B018  # loads the kernel
        self.compiled = compiled
        self.grid = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
        self.device = torch.cuda.current_device()
        types = list(compiled.src.signature.values())[len(descriptors) :]
        self.are_arguments = [kind != "constexpr" for kind in flat(types)]
        codes = _parameter_codes(compiled.asm["ptx"])
        # Each descriptor parameter is followed by its shape and strides.
        wanted = [code for shape, _ in descriptors for code in (_MAP, *"i" * len(shape), *"q" * len(shape))]
        expected = len(wanted) + sum(self.are_arguments) + _SCRATCH
        if len(codes) != expected or codes[: len(wanted)] != wanted or _MAP in codes[len(wanted) :]:
            raise DashError(
                f"{metadata.name} has {len(codes)} parameters, {''.join(codes)}, of which its source explains "
                f"{expected}, that begin with {''.join(wanted)}"
            )
        self._maps = [
            _Map(*d, meta, self.device) for d, meta in zip(descriptors, metadata.tensordesc_meta, strict=True)
        ]
        numbers = [number for shape, strides in descriptors for number in (*shape, *strides)]
        self._described = (ctypes.c_int64 * len(numbers))(*numbers)  # little-endian: low bytes are the int32
        numbered = itertools.count(ctypes.addressof(self._described), 8)
        self._leading = [0 if code == _MAP else next(numbered) for code in wanted]
        self._map_places = [i for i, code in enumerate(wanted) if code == _MAP]
        self._map_room = len(self._maps) * _MAP_BYTES + _MAP_ALIGNMENT
        own = codes[len(wanted) :]
        values = "".join(f"{code}{8 - struct.calcsize(code)}x" for code in own)
        self._packer = struct.Struct(f"={_CONFIG}{len(codes)}Q{values}")
        self._own_places = range(self._packer.size - 8 * len(own), self._packer.size, 8)
        attributes = [
            (_PROGRAMMATIC_STREAM_SERIALIZATION, metadata.launch_pdl), (_COOPERATIVE, metadata.launch_cooperative_grid),
        ]  # fmt: skip
        packed = [struct.pack(_ATTRIBUTE, attribute, 1) for attribute, is_set in attributes if is_set]
        self._attributes = ctypes.create_string_buffer(b"".join(packed))
        self._attribute_facts = ctypes.addressof(self._attributes), len(packed)

    def pack(self, stream: int, addresses: Sequence[int], *arguments: Any) -> tuple[Launch, ...]:
        """Packs a launch on a raw stream with these arguments; returns an empty tuple where the grid is empty.

        Args:
            addresses: one tensor address per TMA descriptor.
            arguments: all other arguments: a tuple for a group, integers for pointers, and any value in place of
                compile-time constants, which may be left out at the end.
        """
        if 0 in self.grid:
            return ()
        memory = ctypes.create_string_buffer(self._packer.size + self._map_room)
        start = ctypes.addressof(memory)
        leading = self._leading.copy()
        for number, (place, map_, address) in enumerate(zip(self._map_places, self._maps, addresses, strict=True)):
            at = self._map_at(start, number)
            map_.write(memory, at, address)
            leading[place] = start + at
        metadata = self.compiled.metadata
        self._packer.pack_into(
            memory, 0, *self.grid, 32 * metadata.num_warps, 1, 1, metadata.shared, stream, *self._attribute_facts,
            *leading, *[start + place for place in self._own_places],
            *itertools.compress(flat(arguments), self.are_arguments), *(0,) * _SCRATCH,
        )  # fmt: skip
        parameters = start + struct.calcsize(f"={_CONFIG}")
        return (Launch(start, self.compiled.function, parameters, self, stream, arguments, memory),)

    def places(self, launch: Launch) -> Places:
        """Returns where the memory of a launch holds the stream, the tensor addresses and the other arguments.

        Args:
            launch: a launch that this kernel packed.
        """
        descriptors = [self._map_at(launch.config, number) // 8 for number in range(len(self._maps))]
        return Places(_STREAM // 8, descriptors, [place // 8 for place in self._own_places[:-_SCRATCH]])

    def is_moved(self, number: int) -> bool:
        """Returns whether TMA descriptor `number` can be redirected by overwriting its address, without the driver."""
        return bool(self._maps[number].behind_address)

    def encode(self, launch: Launch, number: int, address: int) -> None:
        """Writes TMA descriptor `number` of a launch anew, for a tensor at `address`."""
        self._maps[number].write(launch.memory, self._map_at(launch.config, number), address)

    def _map_at(self, start: int, number: int) -> int:
        """Returns the byte offset of descriptor `number` in memory that starts at address `start`."""
        return -(-(start + self._packer.size) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT - start + number * _MAP_BYTES


def is_hooked() -> bool:
    """Returns whether a profiler has registered Triton hooks that run before or after launches."""
    runtime = knobs.runtime
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))  # as `_calls`, in less time


def launch(launches: Iterable[Launch]) -> None:
    """Launches the kernels in order; the current device must be the one they were loaded into.

    Raises:
        LaunchError: the driver returned an error.
    """
    (_launch_with_hooks if is_hooked() else launch_unhooked)(launches)


def launch_unhooked(launches: Iterable[Launch]) -> None:
    """Launches the kernels in order without calling Triton's launch hooks; only if `is_hooked` is false.

    Raises:
        LaunchError: the driver returned an error.
    """
    launch_kernel = _driver().cuLaunchKernelEx
    for each in launches:
        code = launch_kernel(each[0], each[1], each[2], None)
        if code:
            _launch_again(code, *each[:4])


def _launch_with_hooks(launches: Iterable[Launch]) -> None:
    """Launches as Triton does when a profiler has registered functions to call before and after."""
    runtime = knobs.runtime
    for config, function, parameters, kernel, stream, arguments, _ in launches:
        about = kernel.compiled.launch_metadata(kernel.grid, stream, *arguments)
        if _calls(runtime.launch_enter_hook):
            runtime.launch_enter_hook(about)
        code = _driver().cuLaunchKernelEx(config, function, parameters, None)
        if code:
            _launch_again(code, config, function, parameters, kernel)
        if _calls(runtime.launch_exit_hook):
            runtime.launch_exit_hook(about)


def _calls(hook: Any) -> bool:
    """Returns whether a function is registered with the hook."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _launch_again(code: int, config: int, function: int, parameters: int, kernel: KernelLauncher) -> None:
    """Binds the thread to the device's primary context and launches again, if that was the error; raises other errors.

    A thread has no context before its first call of CUDA's runtime, and a backward may be a thread's first work.
    """
    if code == _NO_CONTEXT:
        _bind(kernel.device)
        code = _driver().cuLaunchKernelEx(config, function, parameters, None)
    _check(code, f"launching {kernel.compiled.metadata.name}")


def _bind(index: int) -> None:
    """Makes the device's primary context, which CUDA's runtime uses, current for this thread."""
    driver, device, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    _check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise LaunchError(f"{what}: CUDA error {code}, {(text.value or b'unknown').decode()}")


def _parameter_codes(ptx: str) -> list[str]:
    """Returns the `struct` codes of the kernel's parameters in a PTX, `_MAP` for a TMA descriptor."""
    header = ptx[ptx.index(".entry") :]
    codes = []
    for alignment, kind, length in _PARAMETER.findall(header[: header.index("\n)")]):
        if length and (int(length), int(alignment)) != (_MAP_BYTES, _MAP_ALIGNMENT):
            raise DashError(f"a kernel has a parameter of {length} bytes, which is no TMA descriptor")
        codes.append(_MAP if length else _CODES[kind])
    return codes


class _Map:
    """The TMA descriptors of one argument, which differ in their addresses only.

    CUDA does not document the bytes of a descriptor, and encoding one takes microseconds.  So the driver is probed with
    a few addresses at first use: if it only puts the address before the same bytes, later descriptors are written that
    way.

    Args:
        meta: Triton's description of the tile that the kernel reads.
        device: the index of the device.

    Attributes:
        behind_address: the bytes after the address in every descriptor; empty if they depend on the address, None as
            long as the driver has not been probed.
    """

    def __init__(self, shape: Sequence[int], strides: Sequence[int], meta: dict[str, Any], device: int) -> None:
        if meta["fp4_padded"] or strides[-1] != 1:
            raise DashError(f"a TMA descriptor of strides {tuple(strides)} for {meta}, of which there are none here")
        rank, self._device = len(shape), device
        bytes_ = [meta["elem_size"] * stride for stride in strides[-2::-1]]
        self._dtype, self._rank, self._swizzle = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], rank, meta["swizzle"]
        self._sizes, self._strides = (ctypes.c_uint64 * rank)(*shape[::-1]), (ctypes.c_uint64 * rank)(*bytes_)
        self._box = (ctypes.c_uint32 * rank)(*meta["block_size"][::-1])
        self._steps = (ctypes.c_uint32 * rank)(*(1,) * rank)
        self.behind_address: bytes | None = None

    def write(self, memory: Any, place: int, address: int) -> None:
        """Writes the TMA descriptor of a tensor at `address` into `memory`, at byte offset `place`."""
        if self.behind_address and not address % _ADDRESS_ALIGNMENT:
            struct.pack_into(_DESCRIPTOR, memory, place, address, self.behind_address)
            return
        self._encode(ctypes.addressof(memory) + place, address)
        if self.behind_address is None:
            self.behind_address = self._learned(memory[place : place + _MAP_BYTES], address)

    def _encode(self, start: int, address: int) -> None:
        code = self._ask(start, address)
        if code:  # whatever the driver calls it: a thread may have no context yet
            _bind(self._device)
            code = self._ask(start, address)
        _check(code, f"a TMA descriptor of {[*self._sizes]}, {[*self._strides]} bytes, at {address:#x}")

    def _ask(self, start: int, address: int) -> int:
        """Lets the driver encode the descriptor to memory at `start`; returns its error code."""
        code: int = _driver().cuTensorMapEncodeTiled(
            start, self._dtype, self._rank, address, self._sizes, self._strides, self._box, self._steps,
            _NO_INTERLEAVE, self._swizzle, _L2_PROMOTION_128B, _FILL_ZEROS,
        )  # fmt: skip
        return code

    def _learned(self, encoded: bytes, address: int) -> bytes:
        """Returns the bytes after the address if descriptors at other addresses have the same there, else no bytes."""
        behind = encoded[_ADDRESS_BYTES:]
        memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        start = ctypes.addressof(memory) + -ctypes.addressof(memory) % _MAP_ALIGNMENT
        found = {address: encoded}
        for tried in _TRIED:
            if self._ask(start, tried):
                return b""
            found[tried] = ctypes.string_at(start, _MAP_BYTES)
        return behind if all(struct.pack(_DESCRIPTOR, at, behind) == each for at, each in found.items()) else b""


@functools.cache
def _driver() -> Any:
    """Returns the CUDA driver library, which torch has already loaded."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    driver.cuTensorMapEncodeTiled.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    return driver
