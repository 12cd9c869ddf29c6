"""Launches Triton's compiled kernels by the CUDA driver, from arguments that are packed once.

Triton's own launcher takes a kernel's arguments apart, and encodes its TMA descriptors, on every launch, which takes
longer than the driver needs.  Here `KernelLauncher.pack` does that work for given arguments, and `launch` hands its
results to the driver as often as one likes; `call_launches` changes addresses in between.  How a kernel's arguments lie
in memory is read from its PTX.
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
"""The last parameters of every kernel are two addresses of scratch memory, which ours do not use."""

_CONFIG, _STREAM = "7I4xQQI4x", 32  # CUlaunchConfig, and where the stream is in it
_ATTRIBUTE = "=I4xi60x"  # CUlaunchAttribute whose value is an int
_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6  # CUlaunchAttributeID
_NO_INTERLEAVE, _L2_PROMOTION_128B, _FILL_ZEROS = 0, 2, 0
_MAP, _MAP_BYTES, _MAP_ALIGNMENT = "map", 128, 64  # CUtensorMap
_ADDRESS_ALIGNMENT = 16
"""Bytes by which the address in a descriptor is aligned."""
_ADDRESS_BYTES = 8
_DESCRIPTOR = f"=Q{_MAP_BYTES - _ADDRESS_BYTES}s"
_TRIED = 0x5555_5555_5550, 0x2AAA_AAAA_AAA0
"""Two addresses that differ in every bit that an address has."""
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT

Described = tuple[Sequence[int], Sequence[int]]
"""Shape and strides of a TMA descriptor, in elements."""


class Places(NamedTuple):
    """Where in a launch's memory, in words of 8 bytes, are its stream, the addresses of its descriptors, and its other
    arguments, one by one and without constants.
    """

    stream: int
    descriptors: Sequence[int]
    arguments: Sequence[int]


class Launch(NamedTuple):
    """A launch that is ready.

    Attributes:
        config, parameters: where the driver finds the launch's configuration and addresses of its arguments.
        function: the driver's handle of the kernel.
        kernel, stream, arguments: what a hook of a profiler is told.
        memory: what `config` and `parameters` point to.
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
        are_arguments: which of a launch's other arguments, one by one, are no compile-time constants.

    Args:
        compiled: Triton's compiled kernel; it is loaded into the current device.
        grid: number of programs, or numbers along up to three axes.
        descriptors: shape and strides of each leading descriptor argument.

    Raises:
        DashError: a kernel whose arguments are others than its source says, or that needs what we do not launch with.
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
        # Behind the address of a descriptor a kernel is told its shape and strides.
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
        self._described = (ctypes.c_int64 * len(numbers))(*numbers)  # the first bytes of one are a smaller integer
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
        """The launch on a raw stream with these arguments, none where the grid is empty.

        Args:
            addresses: one per descriptor.
            arguments: all others, a tuple for a group, and anything in the place of compile-time constants, of which
                the last may be left out; addresses as integers.
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
        """Where in the memory of a launch of this kernel is what may change from call to call."""
        descriptors = [self._map_at(launch.config, number) // 8 for number in range(len(self._maps))]
        return Places(_STREAM // 8, descriptors, [place // 8 for place in self._own_places[:-_SCRATCH]])

    def is_moved(self, number: int) -> bool:
        """Whether a descriptor of a launch has another address once that is written to its place."""
        return bool(self._maps[number].behind_address)

    def encode(self, launch: Launch, number: int, address: int) -> None:
        """Let the driver write a descriptor of a launch for another address."""
        self._maps[number].write(launch.memory, self._map_at(launch.config, number), address)

    def _map_at(self, start: int, number: int) -> int:
        """Where in memory that starts there a descriptor is, in bytes."""
        return -(-(start + self._packer.size) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT - start + number * _MAP_BYTES


def is_hooked() -> bool:
    """Whether a profiler has registered functions to call before and after launches."""
    runtime = knobs.runtime
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))  # as `_calls`, in less time


def launch(launches: Iterable[Launch]) -> None:
    """Launch one after the other; the current device is the one that the kernels were loaded into.

    Raises:
        LaunchError: the driver refuses.
    """
    if is_hooked():
        _launch_with_hooks(launches)
        return
    launch_kernel = _driver().cuLaunchKernelEx
    for each in launches:
        code = launch_kernel(each[0], each[1], each[2], None)
        if code:
            _launch_again(code, *each[:4])


def _launch_with_hooks(launches: Iterable[Launch]) -> None:
    """As Triton launches for profilers, which register functions to call before and after."""
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
    """Whether anybody has registered a function."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _launch_again(code: int, config: int, function: int, parameters: int, kernel: KernelLauncher) -> None:
    """A thread has no context before its first call of CUDA's runtime, and a backward may be a thread's first work."""
    if code == _NO_CONTEXT:
        _bind(kernel.device)
        code = _driver().cuLaunchKernelEx(config, function, parameters, None)
    _check(code, f"launching {kernel.compiled.metadata.name}")


def _bind(index: int) -> None:
    """Let this thread work on a device, in the context of CUDA's runtime."""
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
    """The `struct` codes of the parameters of the kernel in a PTX, `_MAP` for a TMA descriptor."""
    header = ptx[ptx.index(".entry") :]
    codes = []
    for alignment, kind, length in _PARAMETER.findall(header[: header.index("\n)")]):
        if length and (int(length), int(alignment)) != (_MAP_BYTES, _MAP_ALIGNMENT):
            raise DashError(f"a kernel has a parameter of {length} bytes, which is no TMA descriptor")
        codes.append(_MAP if length else _CODES[kind])
    return codes


class _Map:
    """TMA descriptors of one argument, which differ in their addresses.

    CUDA says nothing of the bytes of a descriptor, and to encode one takes microseconds.  So the driver is asked at the
    first addresses: where it only puts the address in front of the same bytes, descriptors are made in that way.

    Args:
        meta: Triton's description of the tile that the kernel reads.
        device: the index of the device.

    Attributes:
        behind_address: what is behind the address in every descriptor; empty if the driver writes others there, None as
            long as it has not been asked.
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
        """Write the descriptor of a tensor at `address` to a place in memory, counted in bytes."""
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
        """Let the driver encode; its error."""
        code: int = _driver().cuTensorMapEncodeTiled(
            start, self._dtype, self._rank, address, self._sizes, self._strides, self._box, self._steps,
            _NO_INTERLEAVE, self._swizzle, _L2_PROMOTION_128B, _FILL_ZEROS,
        )  # fmt: skip
        return code

    def _learned(self, encoded: bytes, address: int) -> bytes:
        """What is behind the address in a descriptor, if those at other addresses have the same there, else nothing."""
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
    """The CUDA driver, which has been loaded long since."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    driver.cuTensorMapEncodeTiled.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    return driver
