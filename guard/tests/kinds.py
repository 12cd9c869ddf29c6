"""Kinds of faults: how each is planted into one rank, and what the guard must say of it.

A row of `KINDS` is all that a further kind needs.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from .support.planted import VOCABULARY, Run, flip

Fact = dict[str, Any]
Plant = Callable[[Run, str, ExitStack], Fact | None]
Tensors = Callable[[Run], Iterable[tuple[str, Tensor]]]

BITS = (0, 3, 12, 22, 25, 30)
INNER = ("blocks.0.attn.q", "blocks.1.up", "blocks.0.ln1", "blocks.1.down", "blocks.1.attn.out", "blocks.0.ln2")


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        plant: called by every rank at the moments "begin", "reduced" and "stepped" of the step of the fault; returns
            what it has done: the ``tensor`` as findings name it.  It may put on hooks that the stack takes away.
        modes: in which it can happen.
        named_by: kinds of findings, of which one must name the rank, and the step unless `later`.
        tie: modes in which two copies cannot say which is right, so that both are accused.
        unseen: modes in which only a same-rank recompute can show it: no replica exists, or it comes before the first
            digest.
        without: settings that switch off what finds it.
        later: steps after the fault in which it may be found.
        persists: it strikes at every execution from its step on.
        parts: ranks cannot meet any more, so that checks in which they do are off.
    """

    plant: Plant
    modes: tuple[str, ...]
    named_by: tuple[str, ...]
    tie: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    later: int = 0
    persists: bool = False
    parts: bool = False


def _drawn(run: Run) -> tuple[random.Random, int, int]:
    """What is drawn from the seed of a trial: a generator, an element and a bit."""
    draw = random.Random(run.trial.seed)
    return draw, draw.randrange(1 << 20), draw.choice(BITS)


def flipped(moment: str, stage: str, tensors: Tensors, times: int = 1) -> Plant:
    """Flip a bit of some elements of one of these tensors, on the rank of the trial."""

    def plant(run: Run, now: str, stack: ExitStack) -> Fact | None:
        if now != moment or not run.here:
            return None
        draw, index, bit = _drawn(run)
        name, tensor = draw.choice([pair for pair in tensors(run) if _size(pair[1])])
        for number in range(min(times, _size(tensor))):
            flip(tensor, index + number, bit)
        return {"tensor": f"{stage} {name}", "bit": bit}

    return plant


def _size(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()


def parameters(run: Run) -> Iterable[tuple[str, Tensor]]:
    return run.model.named_parameters()


def replicated(run: Run) -> Iterable[tuple[str, Tensor]]:
    """Parameters that other ranks have too."""
    sharded = ("attn.q.", "attn.k.", "attn.v.", "up.", "out.weight", "down.weight") if run.trial.mode == "tp" else ()
    return [pair for pair in run.model.named_parameters() if not any(part in pair[0] for part in sharded)]


def gradients(run: Run) -> Iterable[tuple[str, Tensor]]:
    return [(name, p.grad) for name, p in run.model.named_parameters() if p.grad is not None]


def replicated_gradients(run: Run) -> Iterable[tuple[str, Tensor]]:
    return [(name, p.grad) for name, p in replicated(run) if p.grad is not None]


def state(run: Run) -> Iterable[tuple[str, Tensor]]:
    return [
        (f"{name} {key}", value)
        for name, parameter in run.model.named_parameters()
        for key, value in sorted(run.optimizer.state[parameter].items())
        if isinstance(value, Tensor)
    ]


def moments(run: Run) -> Iterable[tuple[str, Tensor]]:
    return [pair for pair in state(run) if "exp_avg" in pair[0]]


def buffers(run: Run) -> Iterable[tuple[str, Tensor]]:
    return run.model.named_buffers()


def stepped(stage: str, tensors: Tensors) -> Plant:
    """The optimizer writes something wrong: before anybody can look."""

    def plant(run: Run, now: str, stack: ExitStack) -> Fact | None:
        if now != "begin" or not run.here:
            return None
        wrong = flipped("here", stage, tensors)

        def done(*_: Any) -> None:
            run.trial.fact = wrong(run, "here", stack) or {}

        stack.callback(run.optimizer.register_step_post_hook(done).remove)
        return None

    return plant


def settings_of_the_step(factor: float) -> Plant:
    """A rank has another learning rate in one step."""

    def plant(run: Run, now: str, stack: ExitStack) -> Fact | None:
        if now == "begin" and run.here:
            for group in run.optimizer.param_groups:
                stack.callback(group.__setitem__, "lr", group["lr"])
                group["lr"] *= factor
            return {"tensor": ""}
        return None

    return plant


def other_setting(run: Run, now: str, stack: ExitStack) -> Fact | None:
    """A rank decays its weights otherwise from now on."""
    if now == "begin" and run.here:
        run.optimizer.param_groups[0]["weight_decay"] *= 1.5
        return {"tensor": ""}
    return None


def missed_update(run: Run, now: str, stack: ExitStack) -> Fact | None:
    """A rank does not call its optimizer."""
    if now == "begin" and run.here:
        stack.callback(delattr, run.optimizer, "step")
        run.optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
        return {"tensor": ""}
    return None


def forgotten_step(run: Run, now: str, stack: ExitStack) -> Fact | None:
    """A step counter misses a step while the optimizer steps, before any check can read it."""
    if now != "begin" or not run.here:
        return None
    draw, *_ = _drawn(run)
    name, parameter = draw.choice([pair for pair in run.model.named_parameters() if pair[1] in run.optimizer.state])

    def done(*_: Any) -> None:
        run.optimizer.state[parameter]["step"] -= 1

    stack.callback(run.optimizer.register_step_post_hook(done).remove)
    return {"tensor": f"optimizer state {name} step"}


def reduction(run: Run, now: str, stack: ExitStack) -> Fact | None:
    """The result of a reduction is wrong on one rank: when the backward ends, before anybody can look."""
    if now != "begin" or not run.here:
        return None
    wrong = flipped("here", "gradient", replicated_gradients)
    parameter = next(iter(run.model.parameters()))
    at_end = Variable._execution_engine.queue_callback

    def done() -> None:
        run.trial.fact = wrong(run, "here", stack) or {}

    def begun(module: nn.Module, args: Any, result: Tensor) -> None:
        result.register_hook(lambda gradient: at_end(lambda: at_end(done)))
        handle.remove()

    assert parameter.requires_grad
    handle = run.model.head.register_forward_hook(begun)
    return None


def wrong_copy(run: Run, now: str, stack: ExitStack) -> Fact | None:
    """A bit of a gathered parameter flips after it was gathered, before it is used."""
    if now != "begin" or not run.here:
        return None
    draw, index, bit = _drawn(run)
    module = run.model.get_submodule(draw.choice(INNER[:4]))

    def before(module: nn.Module, args: Any) -> None:
        flip(module.weight, index, bit)
        handle.remove()

    handle = module.register_forward_pre_hook(before)
    return {"tensor": "", "bit": bit}


def other_input(run: Run, now: str, stack: ExitStack) -> Fact | None:
    """What the model is given has changed before anybody has seen it."""
    if now != "begin" or not run.here:
        return None
    _, index, bit = _drawn(run)

    def read(batch: Tensor) -> Tensor:
        batch[index % len(batch), bit % batch.shape[1]] += 1
        return batch % VOCABULARY

    stack.callback(setattr, run, "read", run.read)
    run.read = read
    return {"tensor": ""}


def computed(
    what: str, modules: tuple[str, ...], persists: bool = False, unstable: bool = False, inputs: bool = False
) -> Plant:
    """A module computes its result ("activation"), or what it gives back, wrongly; once, or from now on.

    Args:
        inputs: it is what the module is given that is wrong.
    """

    def plant(run: Run, now: str, stack: ExitStack) -> Fact | None:
        if now != "begin" or not run.here:
            return None
        draw, index, bit = _drawn(run)
        name = draw.choice(modules)
        module = run.model.get_submodule(name)
        forward, done = module.forward, [False]

        def strike(tensor: Tensor) -> None:
            if persists or not done[0]:
                flip(tensor, index + (draw.randrange(1 << 10) if unstable else 0), bit)
            done[0] = True

        def back(weight: Tensor) -> None:
            """FSDP2 puts other tensors into the place of parameters."""
            is_shard = isinstance(weight, DTensor) and run.trial.mode in ("fsdp", "hsdp")
            if not is_shard and id(weight) not in watched:
                watched.add(id(weight))
                stack.callback(weight.register_hook(strike).remove)

        def call(*args: Any) -> Tensor:
            if what == "local gradient":
                back(module.weight)
            elif what == "activation" and inputs:
                strike(args[0])
            result: Tensor = forward(*args)
            if what == "activation" and not inputs:
                strike(result)
            elif what == "gradient of activation" and torch.is_grad_enabled():
                result.register_hook(strike)
            return result

        watched: set[int] = set()
        if what == "local gradient":
            back(module.weight)  # before anybody looks
        module.forward = call  # type: ignore[method-assign]
        stack.callback(functools.partial(setattr, module, "forward", forward))
        return {"tensor": f"{what} {name}{'.weight' * (what == 'local gradient')}", "bit": bit}

    return plant


ALL = ("ddp", "fsdp", "hsdp", "tp", "replicate")
COPIES = ("ddp", "hsdp", "tp", "replicate")
AT_REST, REPLICAS, SAME_RANK, CROSS_RANK = ("at_rest",), ("every",), ("same_rank_recompute",), ("cross_rank_recompute",)

KINDS = {
    "parameter": Kind(flipped("begin", "parameter", parameters), ALL, AT_REST, without=AT_REST + REPLICAS),
    "parameter in step": Kind(
        flipped("reduced", "parameter", parameters), ALL, AT_REST, without=AT_REST + REPLICAS + SAME_RANK
    ),
    "row of parameter": Kind(
        flipped("begin", "parameter", parameters, 16), ALL, AT_REST, without=AT_REST + REPLICAS
    ),
    "optimizer state": Kind(
        flipped("begin", "optimizer state", state), ALL, AT_REST, without=AT_REST + REPLICAS
    ),
    "state in step": Kind(flipped("reduced", "optimizer state", state), ALL, AT_REST, without=AT_REST + REPLICAS),
    "buffer": Kind(flipped("begin", "buffer", buffers), ALL, AT_REST, without=AT_REST + REPLICAS),
    "gradient": Kind(flipped("reduced", "gradient", gradients), ALL, AT_REST, without=AT_REST + REPLICAS),
    "reduction": Kind(reduction, ALL, ("bits",), tie=("hsdp",), unseen=("fsdp",), without=REPLICAS),
    "update": Kind(
        stepped("parameter", parameters), ALL, ("bits", *SAME_RANK), tie=("hsdp",), unseen=("fsdp",),
        without=REPLICAS + SAME_RANK,
    ),
    "state update": Kind(
        stepped("optimizer state", moments), ALL, ("bits", *SAME_RANK), tie=("hsdp",), unseen=("fsdp",),
        without=REPLICAS + SAME_RANK,
    ),
    "learning rate": Kind(settings_of_the_step(1.5), ALL, ("bits",), without=REPLICAS),
    "skipped update": Kind(settings_of_the_step(0.0), ALL, ("bits",), without=REPLICAS),
    "other setting": Kind(other_setting, ALL, ("bits",), without=REPLICAS),
    "step not counted": Kind(forgotten_step, ALL, ("bits", *SAME_RANK), without=REPLICAS + SAME_RANK),
    "missed update": Kind(
        missed_update, ALL, ("bits", "collective"), without=("every", "collectives"), later=1, parts=True
    ),
    "gathered": Kind(wrong_copy, ("fsdp", "hsdp"), ("collective",), without=("collectives", *SAME_RANK, *CROSS_RANK)),
    "forward": Kind(computed("activation", INNER), ALL, SAME_RANK, without=SAME_RANK),
    "embedding": Kind(computed("activation", ("emb",)), ALL, SAME_RANK, without=SAME_RANK),
    "head": Kind(computed("activation", ("head",)), ALL, SAME_RANK, without=SAME_RANK),
    "attention": Kind(
        computed("activation", ("blocks.0.attn.out", "blocks.1.attn.out"), inputs=True), ALL, SAME_RANK,
        without=SAME_RANK,
    ),
    "backward": Kind(computed("gradient of activation", INNER), ALL, SAME_RANK, without=SAME_RANK),
    "local gradient": Kind(computed("local gradient", INNER), ALL, SAME_RANK, without=SAME_RANK),
    "input": Kind(other_input, ALL, ("bits",), unseen=("ddp", "fsdp", "hsdp", "replicate"), without=REPLICAS),
    "defect of forward": Kind(
        computed("activation", INNER, True), ALL, CROSS_RANK, without=CROSS_RANK, later=4, persists=True
    ),
    "defect of backward": Kind(
        computed("gradient of activation", INNER, True), ALL, CROSS_RANK, without=CROSS_RANK, later=4, persists=True
    ),
    "defect of local gradient": Kind(
        computed("local gradient", INNER, True), ALL, CROSS_RANK, without=CROSS_RANK, later=4, persists=True
    ),
    "unstable": Kind(
        computed("activation", INNER, True, True), ALL, CROSS_RANK + SAME_RANK, without=CROSS_RANK + SAME_RANK,
        later=4, persists=True,
    ),
}  # fmt: skip
