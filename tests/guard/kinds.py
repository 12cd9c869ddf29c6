"""Kinds of faults: how each is planted into one rank, and what the guard must say of it.

A row of `KINDS` is all that a further kind needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..support.planted import Run, flip

Fact = dict[str, Any]
Plant = Callable[[Run, str, ExitStack], Fact | None]
Tensors = Callable[[Run], Iterable[tuple[str, Tensor]]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        plant: called by every rank at the moments "begin", "reduced" and "stepped" of the step of the fault; returns
            what it has done: the ``tensor`` as findings name it.  It may put on hooks that the stack takes away.
        modes: in which it can happen.
        named_by: kinds of findings, of which one must name the rank, and the step unless `later`.
        tie: modes in which two copies cannot say which is right, so that both are accused.
        without: settings that switch off what finds it.
    """

    plant: Plant
    modes: tuple[str, ...]
    named_by: tuple[str, ...]
    tie: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    later: int = 0


def flipped(moment: str, stage: str, tensors: Tensors) -> Plant:
    """Flip one bit of one of these tensors, on the rank of the trial."""

    def plant(run: Run, now: str, stack: ExitStack) -> Fact | None:
        if now != moment or not run.here:
            return None
        draw = random.Random(run.trial.seed)
        name, tensor = draw.choice([pair for pair in tensors(run) if pair[1].numel()])
        bit, index = draw.choice([0, 3, 12, 22, 25, 30]), draw.randrange(1 << 20)
        flip(tensor, index, bit)
        return {"tensor": f"{stage} {name}", "bit": bit}

    return plant


def parameters(run: Run) -> Iterable[tuple[str, Tensor]]:
    return run.model.named_parameters()


def replicated(run: Run) -> Iterable[tuple[str, Tensor]]:
    """Parameters that other ranks have too."""
    sharded = ("attn.q.", "attn.k.", "attn.v.", "up.", "out.weight", "down.weight") if run.trial.mode == "tp" else ()
    return [pair for pair in run.model.named_parameters() if not any(part in pair[0] for part in sharded)]


def gradients(run: Run) -> Iterable[tuple[str, Tensor]]:
    return [(name, p.grad) for name, p in replicated(run) if p.grad is not None]


def state(run: Run) -> Iterable[tuple[str, Tensor]]:
    return [
        (f"{name} {key}", value)
        for name, parameter in run.model.named_parameters()
        for key, value in sorted(run.optimizer.state[parameter].items())
        if isinstance(value, Tensor)
    ]


def buffers(run: Run) -> Iterable[tuple[str, Tensor]]:
    return run.model.named_buffers()


def wrong_update(run: Run, now: str, stack: ExitStack) -> Fact | None:
    """The optimizer writes a wrong parameter: before anybody can look."""
    if now != "begin" or not run.here:
        return None
    plant = flipped("here", "parameter", replicated)

    def stepped(*_: Any) -> None:
        run.trial.fact = plant(run, "here", stack) or {}

    stack.callback(run.optimizer.register_step_post_hook(stepped).remove)
    return None


def wrong_copy(run: Run, now: str, stack: ExitStack) -> Fact | None:
    """A bit of a gathered parameter flips after it was gathered, before it is used."""
    if now != "begin" or not run.here:
        return None
    draw = random.Random(run.trial.seed)
    name = draw.choice(["blocks.0.attn.q", "blocks.1.up", "blocks.0.ln1", "blocks.1.down"])
    module = run.model.get_submodule(name)
    bit, index = draw.choice([0, 12, 22, 25, 30]), draw.randrange(1 << 20)

    def before(module: nn.Module, args: Any) -> None:
        flip(module.weight, index, bit)
        handle.remove()

    handle = module.register_forward_pre_hook(before)
    return {"tensor": "", "bit": bit}


ALL = ("ddp", "fsdp", "hsdp", "tp", "replicate")

KINDS = {
    "parameter": Kind(flipped("begin", "parameter", parameters), ALL, ("rest",), without=("rest", "every")),
    "parameter in step": Kind(flipped("reduced", "parameter", parameters), ALL, ("rest",)),
    "optimizer state": Kind(
        flipped("begin", "optimizer state", state), ALL, ("rest",), without=("rest", "every")
    ),
    "buffer": Kind(flipped("begin", "buffer", buffers), ALL, ("rest",), without=("rest", "every")),
    "gradient": Kind(
        flipped("reduced", "gradient", gradients), ("ddp", "hsdp", "tp", "replicate"), ("bits",), tie=("hsdp",),
        without=("every",),
    ),
    "update": Kind(wrong_update, ("ddp", "hsdp", "tp", "replicate"), ("bits",), tie=("hsdp",), without=("every",)),
    "gathered": Kind(wrong_copy, ("fsdp", "hsdp"), ("door",), without=("doors",)),
}  # fmt: skip
