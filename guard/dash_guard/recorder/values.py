"""Gathers the values of gradients and parameters of a step, for comparisons of runs that differ in their layout.

`recordings.layouts` compares them. Each value is written by one rank: of a DTensor by the first rank of its mesh, of a
DDP model by the first rank of its process group, and of anything else by every rank that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from dash_inductor.observers.observer import Observer

from ..fingerprints.fingerprint import why_unseen
from ..recordings.layouts import path_of


class GatheredValues(Observer):
    """Keeps the values of the present step in host memory, as whole tensors.

    Args:
        folder: the folder of the recording.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._replicated = WeakTensorKeyDictionary()  # whether another rank writes a parameter of DDP
        self._taken: dict[str, dict[str, Tensor]] = {}

    def replicated(self, model: DistributedDataParallel) -> None:
        """Leave the parameters of a DDP model to the first rank of its process group."""
        other = dist.get_group_rank(model.process_group, dist.get_rank()) != 0
        for name, parameter in model.module.named_parameters():
            if name not in model.parameters_to_ignore:
                self._replicated[parameter] = other

    def take(self, phase: str, parameters: Sequence[tuple[str, Tensor]], gradients: bool = False) -> None:
        """Copy parameters or their gradients to the host; waits for the device.

        All ranks that share a DTensor call this at the same place, because they gather it.
        """
        for name, parameter in parameters:
            tensor = parameter.grad if gradients else parameter
            if tensor is None or (whole := _gathered(tensor.detach())) is None:
                continue
            if not why_unseen(whole) and not self._replicated.get(parameter, False):
                self._taken.setdefault(phase, {})[name] = whole.cpu().clone()

    def save(self, rank: int, step: int) -> None:
        """Write the values of a step to its file, and forget them."""
        taken, self._taken = self._taken, {}
        if taken:
            path = path_of(self._folder, rank, step)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(taken, path)


def _gathered(tensor: Tensor) -> Tensor | None:
    """The whole tensor; None on ranks that do not write it."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.full_tensor()
    coordinate = tensor.device_mesh.get_coordinate()
    return whole if coordinate is not None and not any(coordinate) else None
