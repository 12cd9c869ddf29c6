"""Adds up the lanes of one device, and brings them to the host without anybody waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .arriving import Arriving
from .fingerprint import add_lanes
from .sizes import LANES

CAPACITY = 4096
"""Fingerprints that are kept on a device until they are copied to the host."""

Ready = Callable[[], list[list[int]]]
"""Waits for a copy and returns its rows; called by the thread that writes."""


class LaneBuffer:
    """The lanes of one device, in the order of `add`."""

    def __init__(self, device: torch.device) -> None:
        self._results = torch.zeros(CAPACITY, LANES, dtype=torch.int64, device=device)
        self._used = 0

    def room(self) -> int:
        return CAPACITY - self._used

    def add(self, tensors: Sequence[Tensor]) -> range:
        """Hash tensors, at most `room()`; the numbers of their rows."""
        rows = range(self._used, self._used + len(tensors))
        add_lanes(tensors, self._results, rows)
        self._used = rows.stop
        return rows

    def copy(self, rows: range) -> Tensor:
        """Rows that were added, on the device."""
        return self._results[rows.start : rows.stop].clone()

    def take(self) -> Ready:
        """Send all rows to the host, and begin anew."""
        used, self._used = self._results[: self._used], 0
        ready = Arriving(used).rows
        used.zero_()
        return ready
