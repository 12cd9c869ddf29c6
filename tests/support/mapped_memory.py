"""Pages of zeros in the memory of the CPU, which nobody can write to: who does is ended by the system."""

from __future__ import annotations

import ctypes
import mmap
import os


class CpuPage:
    """A page that is mapped as `zero_pages` maps those of a GPU."""

    def __init__(self, index: int) -> None:
        self._file = os.memfd_create("zeros")
        os.ftruncate(self._file, mmap.PAGESIZE)
        self._c = ctypes.CDLL(None, use_errno=True)
        self._c.mmap.restype = ctypes.c_void_p
        self._c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def mapped(self, size: int) -> tuple[int, int]:
        """The first address, and how many bytes there are."""
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        start = self._mapped(None, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        for place in range(0, size, mmap.PAGESIZE):
            self._mapped(start + place, mmap.PAGESIZE, mmap.MAP_SHARED | _AT_ADDRESS, self._file)
        return start, size

    def _mapped(self, address: int | None, size: int, flags: int, file: int) -> int:
        found: int = self._c.mmap(address, size, mmap.PROT_READ, flags, file, 0)
        if found in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")
        return found


_AT_ADDRESS = 0x10  # MAP_FIXED
