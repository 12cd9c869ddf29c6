"""Numbers that are being copied from a device to the host; reading them is the only wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class Arriving:
    """A copy of a tensor to the host that has been started."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._host = tensor.clone()
            return
        with torch.cuda.device(tensor.device):
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def here(self) -> bool:
        """Whether they have arrived."""
        return self._arrived is None or self._arrived.query()

    def numbers(self) -> np.ndarray[Any, Any]:
        """The numbers; waits for the copy if necessary."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: np.ndarray[Any, Any] = self._host.numpy()
        return found

    def rows(self) -> list[list[int]]:
        """The numbers of a matrix of integers, row by row; waits for them."""
        found: list[list[int]] = self.numbers().tolist()
        return found
