"""Programs that average, exchange or cut weights and gradients themselves."""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..planted import flip
from .job import Job, Program, network


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def averaged(average: dict[str, Tensor], model: nn.Module) -> None:
    """Average the weights of a model as programs do that keep the average themselves."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            average[name].mul_(0.9).add_(parameter, alpha=0.1)


def by_data(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.data.copy_(value)


def by_numpy(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.detach().numpy()[...] = value.numpy()


def by_version(parameter: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def by_pointer(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.data = value


WRITES = {"data": by_data, "numpy": by_numpy, "version": by_version, "pointer": by_pointer}


def evaluating(write: str, job: Job) -> None:
    """Rank 0 evaluates averaged weights, which it exchanges for the trained ones and puts back."""
    model = DistributedDataParallel(network())
    inner = model.module
    average = values(inner)

    def between(step: int) -> None:
        averaged(average, inner)
        if job.number == 0 and step % 3 == 0:
            trained = {n: p.data if write == "pointer" else p.detach().clone() for n, p in inner.named_parameters()}
            for name, parameter in inner.named_parameters():
                WRITES[write](parameter, average[name])
            with torch.no_grad():
                inner(job.batch(step, 1))
            for name, parameter in inner.named_parameters():
                WRITES[write](parameter, trained[name])

    job.train(model, between)


def evaluating_a_copy(write: str, job: Job) -> None:
    """All ranks average weights in a copy of the model, and rank 0 evaluates it."""
    model = DistributedDataParallel(network())
    copied = copy.deepcopy(model.module).requires_grad_(False)

    def between(step: int) -> None:
        for mine, theirs in zip(copied.parameters(), model.module.parameters(), strict=True):
            WRITES[write](mine, torch.lerp(mine.detach(), theirs.detach(), 0.1))
        if job.number == 0 and step % 3 == 0:
            with torch.no_grad():
                copied(job.batch(step, 1))

    job.train(model, between)


def clamped(what: str, every: int, job: Job) -> None:
    """The program cuts weights or gradients on one rank, past their versions."""
    model = DistributedDataParallel(network())
    weight = model.module[0].weight

    def cut(of: str, step: int) -> None:
        if job.odd and of == what and step >= 4 and step % every == 0:
            (weight.grad if of == "gradients" else weight).data.clamp_(-1e-3, 1e-3)

    job.train(model, functools.partial(cut, "weights"), functools.partial(cut, "gradients"))


def averaging(job: Job, only: int | None = None, flips: int = 0) -> None:
    """The program keeps averaged weights itself, on all ranks or on one; a bit of one flips in step `flips`."""
    model = DistributedDataParallel(network())
    average = values(model.module) if only in (None, job.number) else {}

    def between(step: int) -> None:
        if average:
            averaged(average, model.module)
        if step == flips and job.odd:
            flip(average["0.weight"], 77, 20)

    job.train(model, between, steps=12)


PROGRAMS: dict[str, Program] = {
    **{f"evaluation {write}": functools.partial(evaluating, write) for write in WRITES},
    **{f"evaluation of a copy {write}": functools.partial(evaluating_a_copy, write) for write in WRITES},
    **{
        f"clamped {what} in every {every}": functools.partial(clamped, what, every)
        for what in ("weights", "gradients")
        for every in (1, 5)
    },
    "averages": averaging,
    "averages on one rank": functools.partial(averaging, only=2),
}
