"""Runs programs on several ranks, with and without the guard."""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from dash_guard.checks import all as all_checks
from dash_guard.checks import cross_rank_recompute
from dash_guard.checks.times import Times
from dash_guard.detectors import all as all_detectors
from dash_guard.detectors.liveness import Liveness
from dash_guard.detectors.slow import Slow
from dash_guard.process.rank import Rank
from tests.support.distribution import ROOT
from tests.support.forked import ranks
from tests.support.processes import run_together

from ..planted import Meeting
from . import FAULTS, PROGRAMS
from .job import Job, Program

DETECTORS = tuple(kind for kind in all_detectors.DETECTORS if kind not in (Liveness, Slow))
SETTINGS = {"cross_rank_recompute": 2, "same_rank_recompute": 0}

cross_rank_recompute.AGREE = 2


def run(names: Sequence[str], folder: Path, world: int = 3, seconds: float = 600, checks: str = "") -> dict[str, Any]:
    """The results of programs, by name.

    Args:
        names: of `PROGRAMS` and `FAULTS`.
        folder: where the ranks meet and the results go.
        world: the number of ranks.
        seconds: in which all must have ended.
        checks: "all" also runs each step a second time on the same rank.
    """
    command = [sys.executable, "-m", "guard.tests.support.innocent", str(world), str(folder), checks, *names]
    run_together({"ranks": command}, seconds=seconds, folder=ROOT)
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def guarded(
    program: Program, number: int, world: int, group: dist.ProcessGroup, settings: dict[str, int]
) -> dict[str, Any]:
    """Run a program under the guard; the findings, the coverage, and a digest of what this rank has trained."""
    meeting = Meeting(number, world, group, DETECTORS)
    rank = Rank(number, world, meeting.channel)  # type: ignore[arg-type]
    for kind in all_checks.CHECKS:
        if kind is not Times:
            rank.add(functools.partial(kind, rank, **settings))
    drains = [drain for check in rank.checks if (drain := getattr(check, "drain", None))]
    found = []

    def meet() -> None:
        for drain in drains:
            drain()
        found.extend(meeting.meet())

    rank.start()
    with ExitStack() as stack:
        job = Job(number, world, meet, stack)
        program(job)
        rank.close()
    meet()
    found += meeting.meet(last=True)
    return {
        "findings": [json.loads(finding.to_json()) for finding in found],
        "coverage": meeting.monitor.coverage.to_dict(),
        "digest": job.trained.hexdigest(),
    }


def plain(program: Program, number: int, world: int) -> str:
    """The digest of what this rank trains without the guard."""
    with ExitStack() as stack:
        job = Job(number, world, lambda: None, stack)
        program(job)
    return job.trained.hexdigest()


def seed() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def work(folder: Path, world: int, checks: str, names: Sequence[str], number: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=world)
    group = dist.new_group(list(range(world)))
    assert group is not None
    settings = SETTINGS | ({"same_rank_recompute": 100} if checks == "all" else {})
    results = {}
    for name in names:
        program = (PROGRAMS | FAULTS)[name]
        gc.collect()  # what another program has left
        seed()
        result = guarded(program, number, world, group, settings)
        dist.barrier()
        seed()
        differs = result.pop("digest") != plain(program, number, world)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, differs, group=group)
        results[name] = {**result, "differ": [rank for rank, each in enumerate(everyone) if each]}
    if number == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # a thread of gloo that lets go of a tensor late must not meet an interpreter that is being finalized


def main(world: str, folder: str, checks: str, *names: str) -> int:
    return ranks(int(world), functools.partial(work, Path(folder), int(world), checks, names))
