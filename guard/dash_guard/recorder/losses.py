"""Adds up the loss of a step: the numbers at which its backwards begin, whose gradients add up, too."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..fingerprints.arriving import Arriving
from ..fingerprints.fingerprint import local, why_unseen


class Losses:
    """The sum of the losses of the present step on each device, in float64."""

    def __init__(self) -> None:
        self._unscaled = WeakTensorKeyDictionary()  # the loss, by the product of it and the scale of a `GradScaler`
        self._sums: dict[torch.device, Tensor] = {}

    def scaled(self, loss: Tensor, scaled: Tensor) -> None:
        """Note that a `GradScaler` has multiplied a loss: what is added is the loss without its scale."""
        if scaled is not loss:
            self._unscaled[scaled] = loss.detach()

    def add(self, tensors: Iterable[Tensor]) -> str:
        """Add losses of one element each, without waiting for their devices.

        Returns:
            Why one of them is not known; "" if all of them are.
        """
        for tensor in tensors:
            loss = self._unscaled.get(tensor, tensor).detach()
            if reason := _why_unknown(loss):
                return reason
            value = local(loss).to(torch.float64, copy=True).reshape(())  # the program may write to its own
            self._sums[value.device] = self._sums[value.device] + value if value.device in self._sums else value
        return ""

    def take(self) -> list[Arriving]:
        """Start to copy the sums to the host, and begin with new ones."""
        sums, self._sums = self._sums, {}
        return [Arriving(value) for value in sums.values()]


def _why_unknown(loss: Tensor) -> str:
    if isinstance(loss, DTensor):
        whole = all(placement.is_replicate() for placement in loss.placements)
        return "" if whole else "a DTensor of which this rank has a part"
    if reason := why_unseen(loss):
        return reason
    captured = loss.is_cuda and torch.cuda.is_current_stream_capturing()
    return "captured into a CUDA graph" if captured else ""
