"""Trainings with and without all checks of the guard, of which bits, errors and identities of gradients are kept.

``python -m tests.support.undisturbed WORLD FOLDER NAME ...`` trains these kinds of programs on so many processes, and
rank 0 writes into ``FOLDER/results.jsonl`` what differs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dash_inductor.guard import micro_batch
from dash_inductor.guard.all_checks import CHECKS
from dash_inductor.guard.channel import Local
from dash_inductor.guard.check import Check
from dash_inductor.guard.checks.replicas import Replicas
from dash_inductor.guard.checks.roll_call import RollCall
from dash_inductor.guard.checks.stop import Stop
from dash_inductor.guard.rank import Rank
from dash_inductor.observers.fingerprints.fingerprint import local

from .distribution import ROOT
from .forked import ranks
from .processes import run_together

STEPS = 4
SIZE, OUT = 12, 5
TRACES = "traces"
"""The control in which backwards of the program's own function reach DDP."""


@dataclass
class Training:
    """A program: what it trains, and how it makes a step.

    Attributes:
        model: as the program calls it.
        step: makes step n, from 0, with the inputs of this rank, and calls `update`.
        optimizers: in the order in which they step.
        more: other tensors of the program that must not change.
        seen: what the program itself has seen in this step.
        work: what all ranks do alike in roll calls of the program's own.
        roll_call: holds one of them; without the guard it does nothing.
    """

    model: nn.Module
    step: Callable[[int], object]
    optimizers: list[torch.optim.Optimizer]
    more: Callable[[], Sequence[Tensor]] = tuple
    seen: list[object] = field(default_factory=list)
    work: Callable[[], object] = lambda: None
    roll_call: Callable[[], object] = lambda: None


Build = Callable[[int, int], Training]
KINDS: dict[str, Build] = {}


def kind(build: Build) -> Build:
    """Let a function be the kind of its name."""
    KINDS[build.__name__.replace("_", " ")] = build
    return build


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(SIZE, 17), nn.BatchNorm1d(17), nn.GELU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(17, 9), nn.ReLU(), nn.Linear(9, OUT))


def inputs(number: int, step: int, micro: int = 0) -> Tensor:
    return torch.randn(6, SIZE, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + number))


def loss_of(result: Tensor) -> Tensor:
    return result.square().mean()


def gradients(training: Training) -> list[Tensor | None]:
    return [p.grad for p in training.model.parameters()]


def place(gradient: Tensor | None) -> int:
    return 0 if gradient is None or gradient.is_sparse else local(gradient).data_ptr()


def update(training: Training, to_none: bool = True, zero: bool = True) -> None:
    """Let all optimizers step; gradients must be the same objects at the same places afterwards."""
    before = gradients(training)
    places = [place(g) for g in before]
    for optimizer in training.optimizers:
        optimizer.step()
    after = gradients(training)
    training.seen.append([a is b for a, b in zip(after, before, strict=True)])
    training.seen.append([place(g) for g in after] == places)
    training.seen.append(digest([g for g in after if g is not None]))
    if zero:
        for optimizer in training.optimizers:
            optimizer.zero_grad(set_to_none=to_none)


def simple(
    number: int,
    model: nn.Module,
    make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=0.02, foreach=False),
    to_none: bool = True,
    micro: int = 1,
    before: Callable[[int], object] = lambda step: None,
    after: Callable[[int], object] = lambda step: None,
    more: Callable[[], Sequence[Tensor]] = tuple,
) -> Training:
    """A training with one model and one optimizer; the first step is not accumulated, for the sake of static graphs."""

    def step(n: int) -> None:
        before(n)
        for m in range(micro if n else 1):
            last = m == micro - 1 or n == 0
            with (
                contextlib.nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync()
            ):
                loss_of(model(inputs(number, n, m))).backward()
        update(training, to_none)
        after(n)

    training = Training(model, step, [make(model.parameters())], more)
    return training


# DistributedDataParallel.


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
        loss_of(model(inputs(number, n), int(n == 0 and number == 0))).backward()  # `one` rests from step 1 on
        update(training, to_none=True)

    training = Training(model, step, [torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.3)])
    return training


@kind
def unused_parameters(number: int, world: int) -> Training:
    return branches(number, False)


@kind
def unused_parameters_in_views(number: int, world: int) -> Training:
    return branches(number, True)


def called(number: int, model: nn.Module, runs: Callable[[Tensor], Tensor], **settings: Any) -> Training:
    """A program that holds roll calls of its own, at all places in its steps."""

    def step(n: int) -> None:
        training.roll_call()  # no model has run before the first step
        result = runs(inputs(number, n))
        training.roll_call()  # DDP waits for gradients
        loss_of(result).backward()
        training.roll_call()
        update(training, to_none=bool(n % 2))
        training.roll_call()

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
    training.work = lambda: loss_of(model(inputs(0, 99), 1)).backward()  # uses the layer that rests
    return training


for _view in (False, True):
    for _static in (False, True):
        _name = f"roll calls of ddp{' views' * _view}{' static' * _static}"
        KINDS[_name] = functools.partial(called_ddp, view=_view, static=_static)
    KINDS[f"roll calls with unused parameters{' in views' * _view}"] = functools.partial(called_unused, view=_view)


@kind
def roll_calls_of_reentrant_checkpoints(number: int, world: int) -> Training:
    model = DistributedDataParallel(Checkpointed(True), gradient_as_bucket_view=True)
    return called(number, model, model)


@kind
def roll_calls_of_fsdp(number: int, world: int) -> Training:
    training = sharded(number, world)
    return called(number, training.model, training.model)


@kind
def roll_calls_of_a_model_and_another(number: int, world: int) -> Training:
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


# Hooks of gradients.


def summed(number: int, model: nn.Module, to_none: bool = True) -> Training:
    """Gradients go into sums of the program's own, by hooks behind their accumulation."""
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
    """The last layer has an optimizer in the backward, all others have one behind it."""
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


# Modules and what they keep.


class Tied(nn.Module):
    """Two layers with one weight, and a leaf that is no parameter of the module."""

    def __init__(self, outside: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.two.weight = self.one.weight
        self.hidden = [outside]

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x))) * self.hidden[0]


@kind
def shared_parameters_and_others(number: int, world: int) -> Training:
    outside = torch.ones(SIZE, requires_grad=True)
    model = Tied(outside)
    training = simple(number, model)
    training.optimizers.append(torch.optim.SGD([outside], lr=0.1))
    training.more = lambda: [outside, *([] if outside.grad is None else [outside.grad])]
    return training


@kind
def gradients_of_others_that_stay(number: int, world: int) -> Training:
    """A leaf outside of the model gathers gradients over all steps."""
    outside = torch.ones(SIZE, requires_grad=True)
    return simple(number, Tied(outside), more=lambda: [] if outside.grad is None else [outside.grad])


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.reentrant = nn.Linear(SIZE, 17), nn.Linear(17, OUT), reentrant
        self.block = nn.Sequential(nn.Linear(17, 17), nn.GELU(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant))


@kind
def checkpoints(number: int, world: int) -> Training:
    return simple(number, DistributedDataParallel(Checkpointed(False), gradient_as_bucket_view=True), to_none=False)


@kind
def reentrant_checkpoints(number: int, world: int) -> Training:
    return simple(number, DistributedDataParallel(Checkpointed(True), gradient_as_bucket_view=True), to_none=False)


@kind
def reentrant_checkpoints_of_a_static_graph(number: int, world: int) -> Training:
    model = DistributedDataParallel(Checkpointed(True), gradient_as_bucket_view=True, static_graph=True)
    return simple(number, model, to_none=False)


@kind
def reentrant_checkpoints_with_hooks(number: int, world: int) -> Training:
    return summed(number, Checkpointed(True), to_none=False)


class Keeps(nn.Module):
    """Has state beside buffers: a tensor, a number, a list, and a generator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, OUT)
        self.hidden, self.mean, self.calls = torch.zeros(6, SIZE), torch.zeros(SIZE), 0
        self.kept: list[Tensor] = []
        self.known: dict[str, Tensor] = {}
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.rand(x.shape, generator=self.generator)
        y = torch.tanh(self.layer(x) + 0.3 * self.hidden + self.mean) + 0.01 * noise * self.calls
        self.hidden = y.detach()
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.kept.append(y.square().mean())
        self.known["last"] = y.detach()
        return self.last(y)


@kind
def modules_with_state_of_their_own(number: int, world: int) -> Training:
    model = Keeps()

    def step(n: int) -> None:
        result = model(inputs(number, n))
        (loss_of(result) + sum(model.kept)).backward()
        training.seen.append(len(model.kept))
        model.kept.clear()
        update(training)

    training = Training(model, step, [torch.optim.SGD(model.parameters(), lr=0.1)])
    training.more = lambda: [model.hidden, model.mean, *model.kept, *model.known.values(), model.generator.get_state()]
    return training


@kind
def spectral_norm(number: int, world: int) -> Training:
    model = network()
    nn.utils.parametrizations.spectral_norm(model[0])
    nn.utils.parametrizations.weight_norm(model[4])
    return simple(number, model)


@kind
def compiled(number: int, world: int) -> Training:
    return simple(number, torch.compile(network(), backend="aot_eager"))


@kind
def compiled_ddp(number: int, world: int) -> Training:
    inside = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    model = torch.compile(inside, backend="aot_eager")
    return simple(number, model, to_none=False)


@kind
def autocast(number: int, world: int) -> Training:
    model = network()

    def step(n: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(inputs(number, n)))
        loss.backward()
        update(training)

    training = Training(model, step, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return training


@kind
def scaled_losses(number: int, world: int) -> Training:
    """A scaler of losses, gradients that are clipped, and a step that is skipped."""
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(n: int) -> None:
        scaler.scale(loss_of(model(inputs(number, n))) * (float("inf") if n == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = gradients(training)
        scaler.step(optimizer)
        scaler.update()
        training.seen.append([a is b for a, b in zip(gradients(training), before, strict=True)])
        training.seen.append(scaler.get_scale())
        optimizer.zero_grad(set_to_none=False)

    training = Training(model, step, [optimizer])
    return training


@kind
def kept_graphs(number: int, world: int) -> Training:
    """Two backwards of one graph, and a penalty of gradients with a graph of its own."""
    model = network()

    def step(n: int) -> None:
        x = inputs(number, n).requires_grad_()
        result = model(x)
        loss_of(result).backward(retain_graph=True)
        result.sum().backward(retain_graph=True)
        (gradient,) = torch.autograd.grad(loss_of(result), x, create_graph=True)
        (gradient.norm() * 0.1).backward()
        update(training)

    training = Training(model, step, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return training


@kind
def two_models(number: int, world: int) -> Training:
    """Two models with an optimizer each, of which one trains against the other."""
    torch.manual_seed(0)
    maker = DistributedDataParallel(nn.Sequential(nn.Linear(SIZE, 9), nn.Tanh(), nn.Linear(9, SIZE)))
    critic = DistributedDataParallel(network(), gradient_as_bucket_view=True, broadcast_buffers=False)
    one, two = torch.optim.Adam(maker.parameters(), lr=0.02), torch.optim.Adam(critic.parameters(), lr=0.02)

    def step(n: int) -> None:
        made = maker(torch.randn(6, SIZE))
        loss = critic(inputs(number, n)).mean() - critic(made.detach()).mean()
        loss.backward()
        two.step()
        two.zero_grad(set_to_none=False)
        critic(made).mean().backward()
        one.step()
        one.zero_grad()

    return Training(nn.ModuleList([maker, critic]), step, [one, two])


@kind
def copies_of_the_model(number: int, world: int) -> Training:
    """An averaged copy, a pickled one, and a whole one that is made between steps."""
    model = network()
    averaged: list[Any] = []

    def after(n: int) -> None:
        if not averaged:
            averaged.append(torch.optim.swa_utils.AveragedModel(model))
        averaged[0].update_parameters(model)
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            training.seen.append(digest([twin.eval()(inputs(number, n)), again.eval()(inputs(number, n))]))

    training = simple(number, model, after=after, more=lambda: list(averaged[0].parameters()) if averaged else [])
    return training


@kind
def copies_of_optimizers(number: int, world: int) -> Training:
    model = network()

    def after(n: int) -> None:
        optimizer = training.optimizers[0]
        state = copy.deepcopy(optimizer.state_dict())
        copy.deepcopy(optimizer)
        optimizer.load_state_dict(state)

    training = simple(number, model, after=after)
    return training


# Optimizers.


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


# Shards.


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


# What is compared.


def digest(tensors: Sequence[Any]) -> str:
    """Of the bits of tensors and of what they are; other values by their text."""
    found = hashlib.sha256()
    for each in tensors:
        if isinstance(each, Tensor):
            plain = local(each).detach()
            if plain.is_sparse:
                plain = plain.coalesce()
                found.update(digest([plain.indices(), plain.values()]).encode())
                continue
            found.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
            found.update(plain.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
        else:
            found.update(repr(each).encode())
    return found.hexdigest()[:12]


def state(training: Training) -> dict[str, str]:
    """Digests of all that a step leaves behind."""
    model = training.model
    parameters, buffers = list(model.parameters()), list(model.buffers())
    states = [
        value
        for optimizer in training.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state.get(parameter, {}).items(), key=lambda item: item[0])
    ]
    grads = [parameter.grad for parameter in parameters]
    return {
        "parameters": digest(parameters),
        "optimizer state": digest(states),
        "buffers": digest(buffers),
        "gradients": digest(grads),
        "random": digest([torch.get_rng_state()]),
        "versions": digest([t._version for t in (*parameters, *buffers)]),
        "settings": digest([p.requires_grad for p in parameters] + [m.training for m in model.modules()]),
        "more": digest(training.more()),
    }


def trained(build: Build, number: int, world: int, rank: Rank | None) -> list[Any]:
    """What each step has left, and the error that has ended it."""
    training = build(number, world)
    torch.manual_seed(number)
    left: list[Any] = []
    if rank is not None:
        rank.start()
        for check in rank.checks:
            if isinstance(check, RollCall):
                training.roll_call = lambda check=check: rank.hold(check, lambda: check.hold(training.work))  # type: ignore[misc]
    try:
        for n in range(STEPS):
            training.step(n)
            left.append({**state(training), "seen": digest(training.seen)})
            training.seen.clear()
    except Exception as error:
        left.append({"error": f"{type(error).__name__}: {error}"[:400]})
    finally:
        if rank is not None:
            rank.close()
    hooks = [len(p._backward_hooks or ()) for p in training.model.parameters()]
    left.append({**state(training), "hooks": digest(hooks)})
    return left


class Disturbs(Check):
    """The negative control: a check that leaves something behind."""

    name = "disturbs"

    def __init__(self, rank: Rank, what: str) -> None:
        super().__init__(rank)
        self.what = what

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are complete."""
        parameter = optimizer.param_groups[0]["params"][0]
        if self.what == "gradient" and parameter.grad is not None:
            parameter.grad = parameter.grad.clone()
        elif self.what == "random":
            torch.rand(1)
        elif self.what == "version":
            parameter.detach().add_(0)


def guarded(number: int, world: int, control: str) -> Rank:
    """All checks, each in every step."""
    rank = Rank(number, world, Local().end(number))
    if control and control != TRACES:
        rank.checks = [Disturbs(rank, control)]
        return rank
    settings = {"every": 1, "rest": 1, "roll_call": 1, "replay": 100, "doors": 1}
    rank.checks = [check(rank, **settings) for check in CHECKS]
    replicas = next(check for check in rank.checks if isinstance(check, Replicas))
    rank.checks.append(Stop(rank, replicas))
    return rank


def compared(name: str, number: int, world: int, control: str = "") -> dict[str, Any]:
    """What differs with the guard, by step, and what the guard could not do."""
    plain = trained(KINDS[name], number, world, None)
    rank = guarded(number, world, control)
    with (
        mock.patch.object(micro_batch, "traceless", contextlib.nullcontext)
        if control == TRACES
        else contextlib.nullcontext()
    ):
        with_guard = trained(KINDS[name], number, world, rank)
    differ = [
        [step, key, one.get(key), two.get(key)]
        for step, (one, two) in enumerate(zip(plain, with_guard, strict=False))
        for key in {**one, **two}
        if one.get(key) != two.get(key)
    ]
    if len(plain) != len(with_guard):
        differ.append([min(len(plain), len(with_guard)), "steps", len(plain), len(with_guard)])
    coverage = rank.coverage.to_dict()
    errors = [each["error"] for each in plain if "error" in each]
    return {"name": name, "control": control, "differ": differ, "coverage": coverage, "errors": errors}


def work(number: int, world: int, folder: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=world)
    for name in names:
        kind_of, _, control = name.partition("/")
        mine = compared(kind_of, number, world, control)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, mine)
        if number == 0:
            with open(folder / "results.jsonl", "a") as file:
                file.write(json.dumps(everyone) + "\n")
    dist.destroy_process_group()


def run(names: Sequence[str], folder: Path, world: int = 3, seconds: float = 300) -> dict[str, list[dict[str, Any]]]:
    """What was found for each kind, by rank; "NAME/CONTROL" has another check in the place of the guard's."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.undisturbed", str(world), str(folder), *names]
    run_together({"ranks": command}, seconds=seconds, folder=ROOT)
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return dict(zip(names, rows, strict=True))


def main(world: str, folder: str, *names: str) -> int:
    return ranks(int(world), lambda number: work(number, int(world), Path(folder), names or list(KINDS)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
