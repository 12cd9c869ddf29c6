"""Programs that run cross-rank recomputes of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .ddp import Branches
from .modules import Checkpointed
from .shards import sharded
from .training import (
    KINDS,
    OUT,
    Training,
    inputs,
    kind,
    loss_of,
    network,
    update,
)


def called(number: int, model: nn.Module, runs: Callable[[Tensor], Tensor], **settings: Any) -> Training:
    """A program that runs cross-rank recomputes of its own, at all places in its steps."""

    def step(n: int) -> None:
        training.cross_rank_recompute()  # no model has run before the first step
        result = runs(inputs(number, n))
        training.cross_rank_recompute()  # DDP waits for gradients
        loss_of(result).backward()
        training.cross_rank_recompute()
        update(training, to_none=bool(n % 2))
        training.cross_rank_recompute()

    def work() -> None:
        loss_of(runs(inputs(0, 99))).backward()

    training = Training(model, step, [torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.3)])
    training.work = work
    return training


def called_ddp(number: int, world: int, view: bool, static: bool) -> Training:
    model = DistributedDataParallel(network(), gradient_as_bucket_view=view, static_graph=static, bucket_cap_mb=0.0005)
    return called(number, model, model)


def called_unused(number: int, world: int, view: bool) -> Training:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view)
    training = called(number, model, lambda x: model(x, 0))
    training.work = lambda: loss_of(model(inputs(0, 99), 1)).backward()  # uses the layer that is otherwise unused
    return training


for _view in (False, True):
    for _static in (False, True):
        _name = f"recomputes of ddp{' views' * _view}{' static' * _static}"
        KINDS[_name] = functools.partial(called_ddp, view=_view, static=_static)
    KINDS[f"recomputes with unused parameters{' in views' * _view}"] = functools.partial(called_unused, view=_view)


@kind
def recomputes_of_reentrant_checkpoints(number: int, world: int) -> Training:
    model = DistributedDataParallel(Checkpointed(True), gradient_as_bucket_view=True)
    return called(number, model, model)


@kind
def recomputes_of_fsdp(number: int, world: int) -> Training:
    training = sharded(number, world)
    return called(number, training.model, training.model)


@kind
def recomputes_of_a_model_and_another(number: int, world: int) -> Training:
    """The function runs a second model, and a tensor of its own has gradients, of which training knows nothing."""
    model, other = network(), DistributedDataParallel(network(), gradient_as_bucket_view=True)
    outside = torch.ones(OUT, requires_grad=True)
    outside.grad = torch.full((OUT,), 2.0)
    training = called(number, model, model)

    def work() -> None:
        result = other(inputs(0, 99)) * outside + model(inputs(0, 99))
        loss_of(result).backward()
        assert outside.grad is not None
        assert other.module[0].weight.grad is not None

    training.work = work
    training.more = lambda: [outside.grad, *other.buffers(), *[p.grad for p in other.parameters()]]  # type: ignore[list-item]
    return training
