"""Trainings with and without all checks of the guard, of which bits, errors and identities of gradients are kept."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dash_guard.checks.all import CHECKS
from dash_guard.checks.check import Check
from dash_guard.checks.cross_rank_recompute import CrossRankRecompute
from dash_guard.checks.replicas import Replicas
from dash_guard.checks.stop import Stop
from dash_guard.process import group
from dash_guard.process.rank import Rank
from dash_guard.recompute import micro_batch
from dash_guard.transport.channel import Local
from tests.support.distribution import ROOT
from tests.support.processes import run_together

from .training import (
    KINDS,
    STEPS,
    Build,
    Training,
    digest,
)

TRACES = "traces"
"""The control in which backwards of the program's own function reach DDP."""


def state(training: Training) -> dict[str, str]:
    """Digests of all that a step leaves behind."""
    model = training.model
    parameters, buffers = list(model.parameters()), list(model.buffers())
    states = [
        value
        for optimizer in training.optimizers
        for options in optimizer.param_groups
        for parameter in options["params"]
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
            if isinstance(check, CrossRankRecompute):
                training.cross_rank_recompute = lambda check=check: rank.run_together(
                    check, lambda: check.run_now(training.work)
                )  # type: ignore[misc]
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
    group.PATIENCE = 60.0  # ranks compile for different times
    rank = Rank(number, world, Local().end(number))
    if control and control != TRACES:
        rank.checks = [Disturbs(rank, control)]
        return rank
    settings = {"every": 1, "at_rest": 1, "cross_rank_recompute": 1, "same_rank_recompute": 100, "collectives": 1}
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
    command = [sys.executable, "-W", "ignore", "-m", "guard.tests.support.undisturbed", str(world), str(folder), *names]
    run_together({"ranks": command}, seconds=seconds, folder=ROOT)
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return dict(zip(names, rows, strict=True))
