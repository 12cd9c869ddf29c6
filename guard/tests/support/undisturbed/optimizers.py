"""Programs with optimizers of all kinds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .training import (
    KINDS,
    STEPS,
    Training,
    inputs,
    kind,
    loss_of,
    network,
    simple,
    update,
)


@kind
def closures(number: int, world: int) -> Training:
    """An optimizer that calls the model itself."""
    model = network().eval()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(n: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(inputs(number, n)))
            loss.backward()
            return loss

        optimizer.step(closure)

    return Training(model, step, [optimizer])


@kind
def closures_of_ddp(number: int, world: int) -> Training:
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(n: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = loss_of(model(inputs(number, n)))
            loss.backward()
            return loss

        optimizer.step(closure)

    return Training(model, step, [optimizer])


def _scheduled(number: int) -> Training:
    training = simple(number, network(), lambda p: torch.optim.SGD(p, lr=0.1))
    schedule = torch.optim.lr_scheduler.OneCycleLR(training.optimizers[0], 0.2, total_steps=STEPS + 1)
    step = training.step

    def scheduled(n: int) -> None:
        step(n)
        schedule.step()
        training.seen.append(schedule.get_last_lr())

    training.step = scheduled
    return training


@kind
def schedules(number: int, world: int) -> Training:
    return _scheduled(number)


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.02, fused=True, momentum=0.9, nesterov=True),
    "learning rate in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.02), foreach=False),
    "differentiable": lambda p: torch.optim.SGD(p, lr=0.02, maximize=True, momentum=0.9, dampening=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02, decoupled_weight_decay=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.02),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.02, centered=True, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.02),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.02),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.02),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
}
for _name, _make in _OPTIMIZERS.items():
    KINDS[_name] = functools.partial(lambda number, world, make: simple(number, network(), make), make=_make)


class Sharp(torch.optim.Optimizer):
    """An optimizer of a program, which steps twice: to where the loss is higher, and back."""

    def __init__(self, parameters: Any, base: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(parameters, {})
        self.base = base(self.param_groups)

    @torch.no_grad()
    def away(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["old"])
        self.base.step()


@kind
def optimizers_of_optimizers(number: int, world: int) -> Training:
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = Sharp(model.parameters(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))

    def step(n: int) -> None:
        loss_of(model(inputs(number, n))).backward()
        optimizer.away()
        optimizer.zero_grad(set_to_none=False)
        loss_of(model(inputs(number, n))).backward()
        update(training, to_none=False)

    training = Training(model, step, [optimizer])
    return training
