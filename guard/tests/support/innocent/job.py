"""One rank of a short training run, in which programs that look wrong and are not are written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 64
STEPS = 9
ODD = 1
"""The rank on which something differs, if it is one alone."""

Program = Callable[["Job"], None]
"""Trains on one rank."""


class Job:
    """One rank of a short training run under the guard.

    Attributes:
        odd: whether this is the rank on which something differs.
        stack: closed when the run has ended.
        trained: a hash of the parameters and buffers of models after each step.
    """

    def __init__(self, number: int, world: int, meet: Callable[[], None], stack: ExitStack) -> None:
        self.number, self.world, self.meet, self.stack = number, world, meet, stack
        self.odd = number == ODD
        self.trained = hashlib.blake2b()

    def batch(self, step: int, of: int = 0) -> Tensor:
        """What this rank reads in a step."""
        generator = torch.Generator().manual_seed(1000 * step + 10 * of + self.number)
        return torch.randn(8, WIDTH, generator=generator)

    def train(
        self,
        model: nn.Module,
        between: Callable[[int], object] = lambda step: None,
        in_step: Callable[[int], object] = lambda step: None,
        steps: int = STEPS,
    ) -> None:
        """Train a model; `between` is called before a step, `in_step` between its backward and its update."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        for step in range(1, steps + 1):
            between(step)
            model(self.batch(step)).square().mean().backward()
            in_step(step)
            optimizer.step()
            optimizer.zero_grad()
            self.has_trained(model)
            self.meet()

    def has_trained(self, *models: nn.Module) -> None:
        """Add the present parameters and buffers of models to `trained`."""
        for tensor in (each for model in models for each in (*model.parameters(), *model.buffers())):
            self.trained.update(tensor.detach().numpy().tobytes())


def network(*layers: nn.Module) -> nn.Module:
    """A model of all ranks, equal on all of them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), *layers, nn.Linear(WIDTH, 8))


def set_and_back(job: Job, owner: Any, name: str, value: object) -> None:
    job.stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
