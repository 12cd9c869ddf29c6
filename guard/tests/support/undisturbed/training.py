"""What a program trains, and how it makes a step; what many programs have."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dash_guard.fingerprints.fingerprint import local

STEPS = 4
SIZE, OUT = 12, 5


@dataclass
class Training:
    """A program: what it trains, and how it makes a step.

    Attributes:
        model: as the program calls it.
        step: makes step n, from 0, with the inputs of this rank, and calls `update`.
        optimizers: in the order in which they step.
        more: other tensors of the program that must not change.
        seen: what the program itself has seen in this step.
        work: what all ranks do alike in cross-rank recomputes of the program's own.
        cross_rank_recompute: runs one of them; without the guard it does nothing.
    """

    model: nn.Module
    step: Callable[[int], object]
    optimizers: list[torch.optim.Optimizer]
    more: Callable[[], Sequence[Tensor]] = tuple
    seen: list[object] = field(default_factory=list)
    work: Callable[[], object] = lambda: None
    cross_rank_recompute: Callable[[], object] = lambda: None


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
