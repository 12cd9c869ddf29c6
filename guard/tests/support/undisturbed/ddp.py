"""Programs with DDP and `replicate`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .training import (
    KINDS,
    OUT,
    SIZE,
    Training,
    inputs,
    kind,
    loss_of,
    network,
    simple,
    update,
)


def ddp(number: int, world: int, view: bool, to_none: bool, static: bool, micro: int) -> Training:
    model = DistributedDataParallel(network(), gradient_as_bucket_view=view, static_graph=static, bucket_cap_mb=0.0005)
    return simple(number, model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), to_none, micro)


for _view in (False, True):
    for _none in (True, False):
        for _static in (False, True):
            for _micro in (1, 2):
                _name = " ".join(
                    ("ddp", *(["views"] if _view else []), *([] if _none else ["kept"]),
                     *(["static"] if _static else []), *(["accumulated"] if _micro > 1 else []))
                )  # fmt: skip
                KINDS[_name] = functools.partial(ddp, view=_view, to_none=_none, static=_static, micro=_micro)


class Branches(nn.Module):
    """Uses one of two layers, as steps and ranks go."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = nn.Linear(SIZE, OUT), nn.Linear(SIZE, OUT), nn.Linear(SIZE, OUT)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.three(x) + (self.one(x) if which else self.two(x))


def branches(number: int, view: bool) -> Training:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view)

    def step(n: int) -> None:
        loss_of(model(inputs(number, n), int(n == 0 and number == 0))).backward()  # `one` is unused from step 1 on
        update(training, to_none=True)

    training = Training(model, step, [torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.3)])
    return training


@kind
def unused_parameters(number: int, world: int) -> Training:
    return branches(number, False)


@kind
def unused_parameters_in_views(number: int, world: int) -> Training:
    return branches(number, True)


@kind
def local_steps(number: int, world: int) -> Training:
    """Gradients are not reduced in most steps."""
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)

    def step(n: int) -> None:
        with model.no_sync() if n % 3 else contextlib.nullcontext():
            loss_of(model(inputs(number, n))).backward()
        update(training, to_none=False)

    training = Training(model, step, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return training


def replicated(number: int, syncs: Callable[[int, Any], object], micro: int = 1) -> Training:
    from torch.distributed._composable.replicate import replicate

    model: Any = replicate(network(), gradient_as_bucket_view=True)

    def step(n: int) -> None:
        for m in range(micro):
            syncs(n * micro + m, model)
            loss_of(model(inputs(number, n, m))).backward()
        update(training, to_none=False)

    training = Training(model, step, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return training


@kind
def replicate(number: int, world: int) -> Training:
    return replicated(number, lambda n, model: None)


@kind
def replicate_accumulated(number: int, world: int) -> Training:
    return replicated(number, lambda n, model: model.set_requires_gradient_sync(n % 2 == 1), micro=2)


@kind
def replicate_that_stops_to_reduce(number: int, world: int) -> Training:
    return replicated(number, lambda n, model: model.set_requires_gradient_sync(False) if n == 1 else None)


@kind
def own_comm_hook(number: int, world: int) -> Training:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    model.register_comm_hook(None, fp16_compress_hook)
    return simple(number, model, to_none=False)


@kind
def power_sgd(number: int, world: int) -> Training:
    """A comm hook with state that each reduction changes."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powers

    model = DistributedDataParallel(network())
    state = powers.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powers.powerSGD_hook)
    return simple(number, model, more=lambda: [*state.p_memory_dict.values(), *state.error_dict.values()])


@kind
def uneven_inputs(number: int, world: int) -> Training:
    """Rank 0 has fewer inputs, and joins early."""
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)

    def step(n: int) -> None:
        if n:
            return
        with model.join():
            for each in range(2 + number):
                loss_of(model(inputs(number, each))).backward()
                update(training, to_none=False)

    training = Training(model, step, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return training


@kind
def zero_optimizer(number: int, world: int) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    make = functools.partial(
        ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam, parameters_as_bucket_view=True, lr=0.02
    )
    return simple(number, model, make, to_none=False)


@kind
def sparse_gradients(number: int, world: int) -> Training:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(20, SIZE, sparse=True), nn.Flatten(), nn.Linear(36, 3)))

    def step(n: int) -> None:
        words = torch.randint(20, (4, 3), generator=torch.Generator().manual_seed(7 * n + number))
        loss_of(model(words)).backward()
        update(training, to_none=n % 2 == 0)

    training = Training(model, step, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return training


@kind
def sparse_adam(number: int, world: int) -> Training:
    torch.manual_seed(0)
    model = nn.EmbeddingBag(20, OUT, sparse=True, mode="sum")

    def step(n: int) -> None:
        words = torch.randint(20, (4, 3), generator=torch.Generator().manual_seed(7 * n + number))
        loss_of(model(words)).backward()
        update(training)

    training = Training(model, step, [torch.optim.SparseAdam(list(model.parameters()), lr=0.1)])
    return training


@kind
def parameters_that_freeze(number: int, world: int) -> Training:
    """From step 2 on, some parameters of a model have no gradients; they have them again in step 4."""
    model = network()

    def freeze(n: int) -> None:
        model[0].weight.requires_grad_(n not in (2, 3))
        model[4].requires_grad_(n != 2)

    return simple(number, model, before=freeze)


@kind
def batch_norm_in_eval(number: int, world: int) -> Training:
    model = DistributedDataParallel(network())

    def mode(n: int) -> None:
        model.train()
        if n >= 2:
            model.module[1].eval()

    return simple(number, model, before=mode)


@kind
def own_buffers(number: int, world: int) -> Training:
    """Buffers of ranks differ, and are not broadcast."""
    return simple(number, DistributedDataParallel(network(), broadcast_buffers=False, gradient_as_bucket_view=True))
