"""Programs with FSDP2 and with the first FSDP."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn

from dash_guard.fingerprints.fingerprint import local

from .training import (
    OUT,
    SIZE,
    Training,
    inputs,
    kind,
    loss_of,
    update,
)


def sharded(number: int, world: int, micro: int = 1, to_none: bool = True, **settings: Any) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(SIZE, 18), nn.GELU(), nn.Linear(18, SIZE)) for _ in range(2)]
    model: Any = nn.Sequential(*blocks, nn.Dropout(0.1), nn.Linear(SIZE, OUT))
    mesh = init_device_mesh("cpu", (world,))
    for block in blocks:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)

    def step(n: int) -> None:
        for m in range(micro):
            model.set_requires_gradient_sync(m == micro - 1)
            loss_of(model(inputs(number, n, m))).backward()
        update(training, to_none)

    training = Training(model, step, [torch.optim.AdamW(model.parameters(), lr=0.02)])
    return training


@kind
def fsdp(number: int, world: int) -> Training:
    return sharded(number, world)


@kind
def fsdp_accumulated(number: int, world: int) -> Training:
    return sharded(number, world, micro=2, to_none=False)


@kind
def fsdp_that_stays_whole(number: int, world: int) -> Training:
    return sharded(number, world, reshard_after_forward=False)


@kind
def fsdp_mixed_precision(number: int, world: int) -> Training:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(number, world, micro=2, mp_policy=policy)


@kind
def fsdp_with_hooks(number: int, world: int) -> Training:
    training = sharded(number, world)
    sums = [torch.zeros_like(local(p)) for p in training.model.parameters()]

    def hook(parameter: Tensor, into: Tensor) -> None:
        assert parameter.grad is not None
        into += local(parameter.grad)

    for parameter, into in zip(training.model.parameters(), sums, strict=True):
        parameter.register_post_accumulate_grad_hook(functools.partial(hook, into=into))
    training.more = lambda: sums
    return training


@kind
def fsdp_that_does_not_reduce(number: int, world: int) -> Training:
    """Gradients of some steps stay on their ranks, also over an update, which then does nothing."""
    training = sharded(number, world)
    model: Any = training.model

    def step(n: int) -> None:
        model.set_requires_gradient_sync(n % 2 == 1)
        loss_of(model(inputs(number, n))).backward()
        update(training)

    training.step = step
    return training


def flat(number: int, original: bool, to_none: bool, micro: int = 1) -> Training:
    """The first FSDP, which makes one parameter of many."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    block = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(SIZE, 18), nn.GELU(), nn.Linear(18, SIZE)), device_id=torch.device("cpu"),
        use_orig_params=original,
    )  # fmt: skip
    model: Any = FullyShardedDataParallel(
        nn.Sequential(block, nn.Linear(SIZE, OUT)), device_id=torch.device("cpu"), use_orig_params=original
    )

    def step(n: int) -> None:
        for m in range(micro):
            with contextlib.nullcontext() if m == micro - 1 else model.no_sync():
                loss_of(model(inputs(number, n, m))).backward()
        update(training, to_none)

    training = Training(model, step, [torch.optim.AdamW(model.parameters(), lr=0.02)])
    return training


@kind
def first_fsdp(number: int, world: int) -> Training:
    return flat(number, False, True)


@kind
def first_fsdp_kept(number: int, world: int) -> Training:
    return flat(number, False, False, 2)


@kind
def first_fsdp_with_original_parameters(number: int, world: int) -> Training:
    return flat(number, True, True)


@kind
def first_fsdp_with_original_parameters_kept(number: int, world: int) -> Training:
    return flat(number, True, False, 2)
