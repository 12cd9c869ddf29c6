"""Programs with several models or stages, and layers that do not repeat what they compute."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..planted import flip
from .job import STEPS, WIDTH, Job, Program, network


def broken(module: nn.Module, first: int, element: int = 5) -> Callable[[int], None]:
    """A module computes a bit of its result wrongly from a step on, below PyTorch; called with each step."""
    forward, now = module.forward, [0]

    def call(*args: Any) -> Any:
        result = forward(*args)
        if now[0] >= first:
            flip(result, element, 12)
        return result

    module.forward = call  # type: ignore[method-assign]
    return functools.partial(now.__setitem__, 0)


def adversarial(job: Job, breaks: str = "", ratio: int = 1) -> None:
    """Two models with optimizers that take turns; a layer of one may be broken on rank `ODD` from step 4 on."""
    torch.manual_seed(0)
    makes = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    judges = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
    models = DistributedDataParallel(makes), DistributedDataParallel(judges)
    by = [torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False) for model in models]
    layers = {"generator": makes[0], "discriminator": judges[0]}
    tell = broken(layers[breaks], 4) if breaks and job.odd else lambda step: None
    for step in range(1, STEPS + 1):
        tell(step)
        for turn in range(ratio):
            fake = models[0](job.batch(step, turn)).detach()
            (models[1](fake).mean() - models[1](job.batch(step, 5 + turn)).mean()).backward()
            by[1].step()
            by[1].zero_grad()
        models[1](models[0](job.batch(step, 9))).mean().neg().backward()
        by[0].step()
        for optimizer in by:
            optimizer.zero_grad()
        job.has_trained(*models)
        job.meet()


def piped(job: Job) -> None:
    """Each rank has a stage of a model, of the same layers with other weights, and passes on what it computes."""
    torch.manual_seed(job.number)
    stage: nn.Module = nn.Sequential(nn.Embedding(7, WIDTH)) if job.number == 0 else nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        given = torch.ones(8, dtype=torch.int64) * (step % 7) if job.number == 0 else torch.empty(8, WIDTH)
        if job.number:
            dist.recv(given, job.number - 1)
            given.requires_grad_()
        result = stage(given)
        if job.number < job.world - 1:
            dist.send(result.detach(), job.number + 1)
            gradient = torch.empty(8, WIDTH)
            dist.recv(gradient, job.number + 1)
            result.backward(gradient)
        else:
            result.square().mean().backward()
        if job.number:
            dist.send(given.grad, job.number - 1)
        optimizer.step()
        optimizer.zero_grad()
        job.has_trained(stage)
        job.meet()


class Unrepeatable(nn.Module):
    """A layer that computes something else when it runs again."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why
        if why == "changed":
            self.counts = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.why == "random":
            return x + torch.rand(x.shape, generator=GENERATOR)
        if self.why == "changed":
            return x * (1 + next(self.counts) / 100)
        return torch.ops.dash_guard_test.noise(x)


GENERATOR = torch.Generator()


@torch.library.custom_op("dash_guard_test::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """Adds what is other in each run, and no state decides."""
    return x + int.from_bytes(os.urandom(2), "little") / 1000


noise.register_autograd(lambda context, gradient: gradient.clone())
UNREPEATABLE = {
    "random": "cannot be run again: rand",
    "changed": "its forward may advance a count, which cannot be put back",
    "operator": "not deterministic: ",
}


def unrepeatable(why: str, job: Job) -> None:
    """Ranks do not repeat what they have computed."""
    GENERATOR.manual_seed(job.number)
    job.train(DistributedDataParallel(network(Unrepeatable(why))))


PROGRAMS: dict[str, Program] = {
    "adversarial": adversarial,
    "adversarial 3:1": functools.partial(adversarial, ratio=3),
    "pipeline": piped,
    **{f"unrepeatable {why}": functools.partial(unrepeatable, why) for why in UNREPEATABLE},
}
