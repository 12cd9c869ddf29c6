"""The numbers of training steps, for recordings and the guard; a resumed run continues the numbers of the first one.

A step is what lies between two steps of the same optimizer; a step that a gradient scaler skips counts too.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from dash_inductor.errors import ArgumentError

VARIABLE = "DASH_GUARD_FIRST_STEP"
_MOST = (1 << 32) - 1  # what a recording can say


class StepNumbers:
    """Counts training steps; the number of the first one is known as soon as its optimizer is about to step.

    Args:
        first: the number of the first step; None: the environment variable DASH_GUARD_FIRST_STEP, else one more than
            the count in the state of the first optimizer, else 1.

    Attributes:
        number: the number of the current step.
    """

    def __init__(self, first: int | None = None) -> None:
        if first is None and os.environ.get(VARIABLE):
            text = os.environ[VARIABLE]
            if not text.isdecimal() or not 1 <= int(text) <= _MOST:
                raise ArgumentError(VARIABLE, text, f"a whole number from 1 to {_MOST}")
            first = int(text)
        elif first is not None and not (type(first) is int and 1 <= first <= _MOST):
            raise ArgumentError("first_step", first, f"a whole number from 1 to {_MOST}")
        self._known = first is not None
        self.number = first or 1

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """Derive the number of the first step from the state of an optimizer that is about to step.

        Only the first call does anything, and only if the number was not given; it waits for the optimizer's device.
        """
        if not self._known:
            self._known = True
            done = _done(optimizer)
            if done is not None:
                self.number = min(done + 1, _MOST)

    def retreat(self) -> None:
        """Decrement the step number: what was taken for a new step belongs to the one before."""
        self.number -= 1

    def advance(self) -> None:
        """Increment the step number."""
        self.number += 1


def _done(optimizer: torch.optim.Optimizer) -> int | None:
    """The number of steps that the state of an optimizer has counted; None if it counts none."""
    counts: list[Any] = [
        state["step"] for state in optimizer.state.values() if isinstance(state, dict) and "step" in state
    ]
    if not counts:
        return None
    count = counts[0].item() if isinstance(counts[0], Tensor) and counts[0].numel() == 1 else counts[0]
    return int(count) if isinstance(count, (int, float)) and 0 <= count < _MOST else None
