"""Launches Triton's compiled kernels by the CUDA driver, from arguments that are packed once.

Triton's own launcher takes a kernel's arguments apart, and encodes its TMA descriptors, on every launch, which takes
longer than the driver needs.  Here `KernelLauncher.pack` does that work for given arguments, and `launch` hands its
results to the driver as often as one likes.  How a kernel's arguments lie in memory is read from its PTX.
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
from triton import knobs
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

from ..errors import DashError, LaunchError

_PARAMETER = re.compile(r"\.param (?:\.align (\d+) )?\.(\w+)[^,\n]*?(?:\[(\d+)\])?\s*(?:,|$)", re.MULTILINE)
_CODES = {"u64": "q", "u32": "i", "u16": "h", "u8": "b", "f32": "f", "f64": "d"}
_SCRATCH = 2
"""The last parameters of every kernel are two addresses of scratch memory, which ours do not use."""

_CONFIG = struct.Struct("@7I4xQQI4x")  # CUlaunchConfig
_ATTRIBUTE = struct.Struct("@I4xi60x")  # CUlaunchAttribute whose value is an int
_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6  # CUlaunchAttributeID
_NO_INTERLEAVE, _L2_PROMOTION_128B, _FILL_ZEROS = 0, 2, 0
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64  # CUtensorMap
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT

Described = tuple[Sequence[int], Sequence[int]]
"""Shape and strides of a TMA descriptor, in elements."""


class Launch(NamedTuple):
    """A launch that is ready: nothing in it is ever changed, so that threads may share it.

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
    memory: tuple[Any, ...]


class KernelLauncher:
    """Packs launches of a compiled kernel whose first arguments are TMA descriptors of fixed shapes and strides.

    Args:
        compiled: Triton's compiled kernel; it is loaded into the current device.
        grid: number of programs.
        descriptors: shape and strides of each leading descriptor argument.

    Raises:
        DashError: a kernel whose arguments are others than its source says, or that needs what we do not launch with.
    """

    def __init__(self, compiled: Any, grid: int, descriptors: Sequence[Described]) -> None:
        metadata = compiled.metadata
        if metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
            raise DashError(f"{metadata.name} needs clusters or scratch memory, with which it is not launched")
        compiled.run  # noqa: B018  # loads the kernel
        self.compiled, self.grid = compiled, grid
        self.device = torch.cuda.current_device()
        types = list(compiled.src.signature.values())[len(descriptors) :]
        self._are_arguments = [kind != "constexpr" for kind in types]
        expected = sum(1 + 2 * len(shape) for shape, _ in descriptors) + sum(self._are_arguments) + _SCRATCH
        self._layout = _Layout.of(compiled.asm["ptx"])
        if len(self._layout.offsets) != expected:
            found = len(self._layout.offsets)
            raise DashError(f"{metadata.name} has {found} parameters, of which its source explains {expected}")
        self._maps = [
            _Map.of(shape, strides, meta)
            for (shape, strides), meta in zip(descriptors, metadata.tensordesc_meta or (), strict=True)
        ]
        # A map is encoded in its place; behind it a kernel is told the descriptor's shape and strides.
        self._of_descriptors = [value for shape, strides in descriptors for value in (b"", *shape, *strides)]
        starts = itertools.accumulate((1 + 2 * len(shape) for shape, _ in descriptors), initial=0)
        self._map_offsets = [self._layout.offsets[i] for i, _ in zip(starts, descriptors, strict=False)]
        attributes = []
        if metadata.launch_pdl:
            attributes.append(_ATTRIBUTE.pack(_PROGRAMMATIC_STREAM_SERIALIZATION, 1))
        if metadata.launch_cooperative_grid:
            attributes.append(_ATTRIBUTE.pack(_COOPERATIVE, 1))
        self._attributes = ctypes.create_string_buffer(b"".join(attributes), _ATTRIBUTE.size * len(attributes) or 1)
        self._attribute_count = len(attributes)

    def pack(self, stream: int, addresses: Sequence[int], *arguments: Any) -> tuple[Launch, ...]:
        """The launch on a raw stream with these arguments, none where the grid is empty.

        Args:
            addresses: one per descriptor.
            arguments: all others, with None for each that is a compile-time constant; addresses as integers.
        """
        if not self.grid:
            return ()
        values = itertools.compress(arguments, self._are_arguments)
        memory, start, parameters = self._layout.pack([*self._of_descriptors, *values, *(0,) * _SCRATCH])
        for map_, offset, address in zip(self._maps, self._map_offsets, addresses, strict=True):
            map_.encode(start + offset, address)
        metadata = self.compiled.metadata
        config = ctypes.create_string_buffer(
            _CONFIG.pack(
                self.grid, 1, 1, 32 * metadata.num_warps, 1, 1, metadata.shared, stream,
                ctypes.addressof(self._attributes), self._attribute_count,
            ),
            _CONFIG.size,
        )  # fmt: skip
        return (
            Launch(
                ctypes.addressof(config), self.compiled.function, ctypes.addressof(parameters), self, stream, arguments,
                (config, parameters, memory),
            ),
        )  # fmt: skip


def launch(launches: Iterable[Launch]) -> None:
    """Launch one after the other; the current device is the one that the kernels were loaded into.

    Raises:
        LaunchError: the driver refuses.
    """
    runtime = knobs.runtime
    if _is_hooked(runtime.launch_enter_hook) or _is_hooked(runtime.launch_exit_hook):
        _launch_with_hooks(launches)
        return
    launch_kernel = _driver().cuLaunchKernelEx
    for config, function, parameters, kernel, *_ in launches:
        code = launch_kernel(config, function, parameters, None)
        if code:
            _launch_again(code, config, function, parameters, kernel)


def _launch_with_hooks(launches: Iterable[Launch]) -> None:
    """As Triton launches for profilers, which register functions to call before and after."""
    runtime = knobs.runtime
    for config, function, parameters, kernel, stream, arguments, _ in launches:
        about = kernel.compiled.launch_metadata((kernel.grid, 1, 1), stream, *arguments)
        if _is_hooked(runtime.launch_enter_hook):
            runtime.launch_enter_hook(about)
        code = _driver().cuLaunchKernelEx(config, function, parameters, None)
        if code:
            _launch_again(code, config, function, parameters, kernel)
        if _is_hooked(runtime.launch_exit_hook):
            runtime.launch_exit_hook(about)


def _is_hooked(hook: Any) -> bool:
    """Whether anybody has registered a function."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _launch_again(code: int, config: int, function: int, parameters: int, kernel: KernelLauncher) -> None:
    """A thread has no context before its first call of CUDA's runtime, and a backward may be a thread's first work."""
    driver = _driver()
    if code == _NO_CONTEXT:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        _check(driver.cuDeviceGet(ctypes.byref(device), kernel.device), "cuDeviceGet")
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
        _check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        code = driver.cuLaunchKernelEx(config, function, parameters, None)
    _check(code, f"launching {kernel.compiled.metadata.name}")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise LaunchError(f"{what}: CUDA error {code}, {(text.value or b'unknown').decode()}")


class _Layout(NamedTuple):
    """How a kernel's arguments lie in memory.

    Attributes:
        values: packs all of them; a TMA descriptor is an empty string, in whose place there are zeros.
        offsets: of each argument, in bytes.
    """

    values: struct.Struct
    offsets: list[int]

    @staticmethod
    def of(ptx: str) -> _Layout:
        """Read from the PTX of a kernel."""
        header = ptx[ptx.index(".entry") :]
        offsets, text, end = [], "=", 0
        for alignment, kind, length in _PARAMETER.findall(header[: header.index("\n)")]):
            code = f"{length}s" if length else _CODES[kind]
            if length and (int(length), int(alignment)) != (_MAP_BYTES, _MAP_ALIGNMENT):
                raise DashError(f"a kernel has a parameter of {length} bytes, which is no TMA descriptor")
            start = -(-end // _MAP_ALIGNMENT) * _MAP_ALIGNMENT if length else -(-end // 8) * 8
            text += f"{start - end}x{code}"
            offsets.append(start)
            end = start + struct.calcsize("=" + code)
        return _Layout(struct.Struct(text), offsets)

    def pack(self, values: Sequence[Any]) -> tuple[Any, int, Any]:
        """The memory that holds the values, where it begins, and an array of their addresses."""
        memory = ctypes.create_string_buffer(self.values.size + _MAP_ALIGNMENT)
        start = -(-ctypes.addressof(memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        self.values.pack_into(memory, start - ctypes.addressof(memory), *values)
        parameters = (ctypes.c_uint64 * len(self.offsets))(*(start + offset for offset in self.offsets))
        return memory, start, parameters


class _Map(NamedTuple):
    """What is known of a TMA descriptor without its address: arguments of ``cuTensorMapEncodeTiled``."""

    dtype: int
    rank: int
    sizes: Any
    strides: Any
    box: Any
    steps: Any
    swizzle: int

    @staticmethod
    def of(shape: Sequence[int], strides: Sequence[int], meta: dict[str, Any]) -> _Map:
        """For Triton's description of the tile that a kernel reads."""
        if meta["fp4_padded"] or strides[-1] != 1:
            raise DashError(f"a TMA descriptor of strides {tuple(strides)} for {meta}, of which there are none here")
        rank = len(shape)
        inwards = [meta["elem_size"] * stride for stride in strides[-2::-1]]
        return _Map(
            TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], rank, (ctypes.c_uint64 * rank)(*shape[::-1]),
            (ctypes.c_uint64 * max(rank - 1, 1))(*inwards), (ctypes.c_uint32 * rank)(*meta["block_size"][::-1]),
            (ctypes.c_uint32 * rank)(*(1,) * rank), meta["swizzle"],
        )  # fmt: skip

    def encode(self, place: int, address: int) -> None:
        """Write the descriptor of a tensor at `address` to `place`."""
        code = _driver().cuTensorMapEncodeTiled(
            place, self.dtype, self.rank, address, self.sizes, self.strides, self.box, self.steps, _NO_INTERLEAVE,
            self.swizzle, _L2_PROMOTION_128B, _FILL_ZEROS,
        )  # fmt: skip
        _check(code, f"a TMA descriptor of {[*self.sizes]}, {[*self.strides]} bytes, at {address:#x}")


@functools.cache
def _driver() -> Any:
    """The CUDA driver, which has been loaded long since."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    driver.cuTensorMapEncodeTiled.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    return driver
