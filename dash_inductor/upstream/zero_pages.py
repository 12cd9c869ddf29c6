"""Zero tensors without memory of their own: the CUDA driver maps one physical page of zeros to many addresses.

They are read-only, and only their own device can read them.  All addresses refer to the same page, so reads come from
the L2 cache.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger("dash_inductor")

LEAST = 16 << 20
"""The least size in bytes of such tensors; smaller ones are written in a few microseconds."""


class Page(Protocol):
    """A physical page of zeros in the memory of one device."""

    def mapped(self, size: int) -> tuple[int, int]:
        """Maps the page repeatedly, read-only, so that it fills a new address range of at least `size` bytes.

        Returns:
            The first address, and the size of the range in bytes.

        Raises:
            OSError: the device or its driver does not support this.
        """
        ...


class _CudaPage:
    """A page of a CUDA device, of the smallest size that its driver can map: 2 MiB."""

    def __init__(self, index: int) -> None:
        self._driver = _driver()
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._location = _Location(_DEVICE, device.value)
        properties = _Properties(_PINNED, 0, self._location)
        granularity, handle = ctypes.c_size_t(), ctypes.c_uint64()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), 0)
        self._size = granularity.value
        self._call("cuMemCreate", ctypes.byref(handle), self._size, ctypes.byref(properties), 0)
        self._handle = handle.value
        address, _ = self._mapped(1, _READ_WRITE)
        _bytes(address, torch.device("cuda", index), self._size).zero_()
        torch.cuda.synchronize(index)
        self._release(address, 1, 1)

    def mapped(self, size: int) -> tuple[int, int]:
        return self._mapped(-(-size // self._size), _READ)

    def _mapped(self, times: int, access: int) -> tuple[int, int]:
        start, size, done = ctypes.c_uint64(), times * self._size, 0
        self._call("cuMemAddressReserve", ctypes.byref(start), size, 0, 0, 0)
        try:
            for done in range(times):
                self._call("cuMemMap", start.value + done * self._size, self._size, 0, self._handle, 0)
            done = times
            self._call("cuMemSetAccess", start.value, size, ctypes.byref(_Access(self._location, access)), 1)
        except OSError:
            self._release(start.value, times, done)
            raise
        return start.value, size

    def _release(self, start: int, times: int, mapped: int) -> None:
        for number in range(mapped):
            self._call("cuMemUnmap", start + number * self._size, self._size)
        self._call("cuMemAddressFree", start, times * self._size)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise OSError(f"{name}: CUDA error {code}")


PAGES: dict[str, Callable[[int], Page]] = {"cuda": _CudaPage}
"""For each device type, the function that makes the page of a device given by its index."""


class _Device:
    """The address ranges of a device's page.  They are never unmapped, because the last read is not known."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._page: Page | None = None
        self._zeros: Tensor | None = None
        self._refused, self._lock = False, threading.Lock()

    def zeros(self, size: int) -> Tensor | None:
        """Zeros of at least `size` bytes, as uint8; None if the device does not support them, or not at this moment."""
        with self._lock:
            if self._zeros is not None and len(self._zeros) >= size:
                return self._zeros
            if self._refused or (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                return None
            try:
                self._page = self._page or PAGES[self._device.type](self._device.index or 0)
                address, mapped = self._page.mapped(max(size, 2 * len(self._zeros) if self._zeros is not None else 0))
            except OSError as error:
                self._refused = True
                log.info("zeros on %s take memory: %s", self._device, error)
                return None
            _RANGES.append((address, address + mapped))
            self._zeros = _bytes(address, self._device, mapped)
            return self._zeros


_DEVICES: dict[torch.device, _Device] = {}
_RANGES: list[tuple[int, int]] = []
"""The address ranges (first, end) of zeros on all devices."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Returns a read-only contiguous tensor of zeros without memory of its own.

    Returns None if it would have less than `LEAST` bytes, or if the device does not support this now.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST or device.type not in PAGES:
        return None
    found = _DEVICES.setdefault(device, _Device(device)).zeros(size)
    return None if found is None else found[:size].view(dtype).view(tuple(shape))


def is_read_only(tensor: Tensor) -> bool:
    """Whether a tensor lies in the read-only memory of the zeros that `zeros` returns."""
    if tensor.layout is not torch.strided:  # has no address
        return False
    address = tensor.data_ptr()
    return any(start <= address < end for start, end in _RANGES)


def _bytes(address: int, device: torch.device, size: int) -> Tensor:
    """A uint8 tensor of the memory at an address, which it does not own."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, torch.Size((size,)), (1,))


_DEVICE, _PINNED, _READ, _READ_WRITE = 1, 1, 1, 3  # CUmemLocationType, CUmemAllocationType, CUmemAccess_flags


class _Location(ctypes.Structure):
    """The CUDA driver's struct CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """The CUDA driver's struct CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Location), ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """The CUDA driver's struct CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def _driver() -> ctypes.CDLL:
    """The CUDA driver library, which torch has already loaded, with the argument types of the functions used here.

    Raises:
        OSError: it is not available.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, address, size, flags = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64
    driver.cuDeviceGet.argtypes = [pointer, ctypes.c_int]
    driver.cuMemGetAllocationGranularity.argtypes = [pointer, pointer, ctypes.c_int]
    driver.cuMemCreate.argtypes = [pointer, size, pointer, flags]
    driver.cuMemAddressReserve.argtypes = [pointer, size, size, address, flags]
    driver.cuMemMap.argtypes = [address, size, size, ctypes.c_uint64, flags]
    driver.cuMemSetAccess.argtypes = [address, size, pointer, size]
    driver.cuMemUnmap.argtypes = [address, size]
    driver.cuMemAddressFree.argtypes = [address, size]
    return driver
