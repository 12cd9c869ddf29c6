"""Collects the lanes (128-bit hashes) of tensors on one device, and copies them to the host without waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .arriving import Arriving
from .fingerprint import add_lanes
from .sizes import LANES

CAPACITY = 4096
"""The largest number of fingerprints on a device before they are copied to the host."""

Ready = Callable[[], list[list[int]]]
"""Waits for a copy and returns its rows; called by the writer thread."""


class LaneBuffer:
    """A buffer on one device for the lanes (128-bit hashes) of tensors, a row for each tensor, in `add` order."""

    def __init__(self, device: torch.device) -> None:
        self._results = torch.zeros(CAPACITY, LANES, dtype=torch.int64, device=device)
        self._used = 0

    def free(self) -> int:
        """The number of free rows in the buffer."""
        return CAPACITY - self._used

    def add(self, tensors: Sequence[Tensor]) -> range:
        """Hash at most `free()` tensors into the next rows; returns the range of these rows."""
        rows = range(self._used, self._used + len(tensors))
        add_lanes(tensors, self._results, rows)
        self._used = rows.stop
        return rows

    def copy(self, rows: range) -> Tensor:
        """A copy of a range of rows on the device, int64 [rows, 2]."""
        return self._results[rows.start : rows.stop].clone()

    def take(self) -> Ready:
        """Start to copy all used rows to the host, and clear the buffer; returns a function that waits for the copy."""
        used, self._used = self._results[: self._used], 0
        ready = Arriving(used).rows
        used.zero_()
        return ready
