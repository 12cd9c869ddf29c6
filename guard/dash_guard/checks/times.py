"""Measures when the steps of a rank begin and end, by the rank's own clock."""

from __future__ import annotations

import statistics
import time
from collections import deque
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from dash_inductor.errors import described
from dash_inductor.observers import active

from ..recompute.backwards import Backwards
from .check import Check, Host


class Times(Check):
    """A check that records, for each step, when the last backward before the first optimizer ended.

    Gradients have been reduced by then, so all ranks are there at the same time. This is the common zero of their
    clocks, which are not compared otherwise. What a rank does from there on, such as clipping gradients, counts as its
    own time.
    """

    name = "times"

    def __init__(self, rank: Host, **settings: Any) -> None:
        super().__init__(rank, **settings)
        self._marks: deque[tuple[int, int]] = deque(maxlen=256)  # step, nanoseconds
        self._last: tuple[int, int] | None = None
        self._durations: deque[float] = deque(maxlen=32)
        self._marked = self._ended = 0
        self._backwards = Backwards(self._backward_ended, self._failed)

    def module_begins(self, module: nn.Module) -> None:
        """Pass the start of a module's forward on to `Backwards`, which finds out when backwards end."""
        self._backwards.module_begins()

    def module_ended(self, module: nn.Module, result: Any) -> None:
        """Pass the end of a module's forward on to `Backwards`, which finds out when backwards end."""
        self._backwards.module_ended(result)

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the time at which the step's last backward ended, before the step's first optimizer."""
        step = self.rank.step
        if step != self._marked:
            self._marked = step
            now, self._ended = self._ended or time.time_ns(), 0
            if self._marks:
                self._durations.append((now - self._marks[-1][1]) / 1e9)
            self._marks.append((step, now))

    def _backward_ended(self) -> None:
        if active.is_on(self.rank):  # not in a cross-rank recompute
            self._ended = time.time_ns()  # the clock of the flight recorder

    def _failed(self, error: Exception) -> None:
        self.rank.coverage.unseen("slow", f"from the end of backwards on: {described(error)}")

    def median(self) -> float:
        """The median duration of the last 32 steps in seconds; 0.0 before the first one has ended."""
        return round(statistics.median(tuple(self._durations) or (0.0,)), 4)

    def last(self) -> int:
        """When the last step's backward ended, in nanoseconds since the epoch; 0 if none has."""
        return self._marks[-1][1] if self._marks else 0

    def take(self) -> list[tuple[int, int, int]]:
        """The steps that have ended since the last call, as (step, begin, end), in nanoseconds since the epoch."""
        marks = list(self._marks)
        new = [
            (step, begin, end)
            for (before, begin), (step, end) in pairwise(marks)
            if step == before + 1 and (self._last is None or step > self._last[0])
        ]
        if marks:
            self._last = marks[-1]
        return new
