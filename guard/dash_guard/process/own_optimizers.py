"""Tells optimizers of models that a rank trains by itself, such as a copy that rank 0 tunes, from those of the job."""

from __future__ import annotations

import weakref

import torch

from ..checks.state import State


class OwnOptimizers:
    """The optimizers of this process, by whether they update a model that several ranks are declared to train.

    In a job in which the program declares this by DDP or DTensors, an optimizer of another model is not one of the job:
    other ranks may have no such optimizer, so that it is neither a step of training nor checked. In a job in which
    nothing is declared, all optimizers count.
    """

    def __init__(self) -> None:
        self._shared: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()

    def has(self, optimizer: torch.optim.Optimizer, state: State) -> bool:
        """Whether an optimizer that is about to step, or has stepped, is this rank's own.

        Args:
            optimizer: the optimizer.
            state: the training state of this rank.
        """
        if not self._shared.get(optimizer):
            self._shared[optimizer] = state.is_shared(optimizer)
        return not self._shared[optimizer] and any(self._shared.values())
