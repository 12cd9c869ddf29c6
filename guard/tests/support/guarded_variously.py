"""Train on two processes under guards that break, and compare bits.

``python -m guard.tests.support.guarded_variously FOLDER SCENARIO...``

Prints one JSON object: by scenario, whether the parameters have the bits of a training without a guard, and what the
guard of rank 0 says of its coverage and its findings.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dash_guard
from dash_guard.checks.same_rank_recompute import SameRankRecompute
from dash_guard.process import group
from dash_guard.process.guard import Guard
from dash_guard.report.findings import Finding
from dash_guard.transport import store
from tests.support.forked import ranks

RANKS, STEPS = 2, 30
IN_STORE = threading.Lock()
"""Held while this rank is in the store through which it reaches the monitor."""
PACED = ("clean", "killed", "full", "held")
"""Scenarios in which something happens during the training, which takes its time."""


def train(in_step: Callable[[int], object] = lambda step: None, pause: float = 0.0) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        in_step(step)
        time.sleep(pause)
    return [parameter.detach().clone() for parameter in model.parameters()]


def monitor(folder: Path) -> int:
    """The process of the monitor, once it is there."""
    path = folder / "monitor.json"
    while not path.exists():
        time.sleep(0.01)
    return int(json.loads(path.read_text())["pid"])


def one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of sessions that holds `IN_STORE`."""

    @functools.wraps(method)
    def call(*args: Any) -> Any:
        with IN_STORE:
            return method(*args)

    return call


def is_running(pid: int) -> bool:
    """Whether a process is there, and has not ended without being waited for."""
    try:
        state = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def kill_between_calls(folder: Path) -> None:
    """Ends the monitor while no rank is in the store, which logs a stack of C++ where its connection ends in a call."""
    with IN_STORE:
        dist.barrier()
        if dist.get_rank() == 0:
            pid = monitor(folder)
            os.kill(pid, signal.SIGKILL)
            while is_running(pid):
                time.sleep(0.01)
        dist.barrier()


def raising(guard: Guard) -> None:
    """From now on the check of same-rank recomputes ends on this rank, while others begin to wait for it."""

    def fail(optimizer: torch.optim.Optimizer) -> None:
        raise OSError("a planted error")

    assert guard._rank is not None
    (check,) = (each for each in guard._rank.checks if isinstance(each, SameRankRecompute))
    check.before_optimizer = fail  # type: ignore[method-assign]


def scenario(name: str, folder: Path) -> tuple[Guard, list[torch.Tensor]]:
    """Train once under a guard that something happens to."""
    first = dist.get_rank() == 0
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if name == "no folder" and first:
        folder.write_text("a file")
    guard = dash_guard.guard(
        folder / "in" if name == "no folder" else folder,
        live=name != "not live",
        same_rank_recompute=100 if name == "raises" else int(first and name == "settings"),
    )
    group.PATIENCE = 1.5 if name in ("alone", "late") else 60.0
    if name == "alone" and not first:
        return guard, train()
    if name == "late" and not first:
        parameters = train(lambda step: guard.start() if step == 4 else None)
        guard.close()
        return guard, parameters

    def happens(step: int) -> None:
        if step == 10 and name == "killed":
            kill_between_calls(folder)
        if step == 10 and name == "full" and first:
            resource.prlimit(monitor(folder), resource.RLIMIT_FSIZE, (1, limit[1]))
        if step == 5 and name == "raises" and not first:
            raising(guard)
        if step == 20 and name == "held" and first:
            os.kill(monitor(folder), signal.SIGSTOP)

    with guard:
        if first and name != "no folder":
            monitor(folder)
        parameters = train(happens, 0.02 if name in PACED else 0.0)
    if name == "held" and first:
        os.kill(monitor(folder), signal.SIGKILL)
    return guard, parameters


def work(folder: str, names: Sequence[str], rank: int) -> None:
    torch.set_num_threads(1)
    for method in ("__init__", "push", "pop"):
        setattr(store._End, method, one_at_a_time(getattr(store._End, method)))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    expected = train()
    facts: dict[str, Any] = {}
    for name in names:
        guard, parameters = scenario(name, Path(folder, name.replace(" ", "-")))
        found: list[Finding] = []
        if name != "no folder":
            found = guard.findings
        facts[name] = {
            "equal": all(map(torch.equal, expected, parameters)),
            "coverage": guard.coverage,
            "findings": [finding.sentence for finding in found],
        }
        dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(facts), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that lets go of a tensor late must not meet an interpreter that is being finalized


if __name__ == "__main__":
    sys.exit(ranks(RANKS, functools.partial(work, sys.argv[1], sys.argv[2:])))
