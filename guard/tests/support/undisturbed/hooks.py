"""Programs with hooks of gradients, and with optimizers in the backward."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .training import (
    Training,
    inputs,
    kind,
    loss_of,
    network,
    simple,
    update,
)


def summed(number: int, model: nn.Module, to_none: bool = True) -> Training:
    """Gradients go into sums of the program's own, by hooks after their accumulation."""
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]

    def hook(parameter: Tensor, into: Tensor) -> None:
        assert parameter.grad is not None
        into += parameter.grad

    for parameter, into in zip(model.parameters(), sums, strict=True):
        parameter.register_post_accumulate_grad_hook(functools.partial(hook, into=into))
    return simple(number, model, to_none=to_none, more=lambda: sums)


@kind
def sums_of_gradients(number: int, world: int) -> Training:
    return summed(number, network())


@kind
def sums_of_gradients_of_ddp(number: int, world: int) -> Training:
    return summed(number, DistributedDataParallel(network(), gradient_as_bucket_view=True), to_none=False)


@kind
def gradients_moved_by_a_hook(number: int, world: int) -> Training:
    """A hook takes gradients away at once, and the program gives their sums back."""
    model = network()
    kept = [torch.zeros_like(p) for p in model.parameters()]

    def hook(parameter: Tensor, into: Tensor) -> None:
        into += parameter.grad
        parameter.grad = None

    for parameter, into in zip(model.parameters(), kept, strict=True):
        parameter.register_post_accumulate_grad_hook(functools.partial(hook, into=into))

    def step(n: int) -> None:
        for m in range(2):
            loss_of(model(inputs(number, n, m))).backward()
        for parameter, into in zip(model.parameters(), kept, strict=True):
            parameter.grad = into
        update(training, zero=False)
        for parameter, into in zip(model.parameters(), kept, strict=True):
            parameter.grad = None
            into.zero_()

    training = Training(model, step, [torch.optim.AdamW(model.parameters(), lr=0.02)], lambda: kept)
    return training


@kind
def hooks_that_change_gradients(number: int, world: int) -> Training:
    model = DistributedDataParallel(network())
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return simple(number, model)


def in_backward(number: int, model: nn.Module) -> Training:
    """Each parameter has an optimizer that steps as soon as its gradient is there."""
    optimizers = {p: torch.optim.Adam([p], lr=0.02, foreach=False) for p in model.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return Training(model, lambda n: loss_of(model(inputs(number, n))).backward(), list(optimizers.values()))


@kind
def optimizers_in_the_backward(number: int, world: int) -> Training:
    return in_backward(number, network())


@kind
def optimizer_in_the_backward_and_another(number: int, world: int) -> Training:
    """The last layer has an optimizer in the backward, all others have one after it."""
    model = network()
    own = torch.optim.SGD(model[6].parameters(), lr=0.1)
    count = [0]

    def hook(parameter: Tensor) -> None:
        count[0] += 1
        if count[0] % 2 == 0:
            own.step()
            own.zero_grad()

    for parameter in model[6].parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    training = simple(number, model, lambda p: torch.optim.SGD(list(p)[:-2], lr=0.1))
    return training
