"""Tensors that are being copied from a device to the host; only reading their values waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class Arriving:
    """An asynchronous copy of a tensor to the host, started when this is created."""

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
        """Whether the copy has completed."""
        return self._arrived is None or self._arrived.query()

    def numbers(self) -> np.ndarray[Any, Any]:
        """The copied values, as an array with the tensor's shape; waits for the copy if necessary."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: np.ndarray[Any, Any] = self._host.numpy()
        return found

    def rows(self) -> list[list[int]]:
        """The copied values of an integer matrix, as a list for each row; waits for the copy if necessary."""
        found: list[list[int]] = self.numbers().tolist()
        return found
