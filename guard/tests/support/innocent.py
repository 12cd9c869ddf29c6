"""Programs without a defective machine that do what a guard may take for one.

``python -m guard.tests.support.innocent WORLD FOLDER NAME...`` runs `PROGRAMS` one after the other on WORLD ranks, and
rank 0 writes ``FOLDER/results.json``: by name, the findings and the coverage.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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

from .planted import Meeting

WIDTH = 64
STEPS = 9
ODD = 1
"""The rank on which something differs, if it is one alone."""

DETECTORS = tuple(kind for kind in all_detectors.DETECTORS if kind not in (Liveness, Slow))
SETTINGS = {"cross_rank_recompute": 2, "same_rank_recompute": 0}

cross_rank_recompute.AGREE = 2


class Job:
    """One rank of a short training run under the guard.

    Attributes:
        odd: whether this is the rank on which something differs.
        stack: closed when the run has ended.
    """

    def __init__(self, number: int, world: int, meet: Callable[[], None], stack: ExitStack) -> None:
        self.number, self.world, self.meet, self.stack = number, world, meet, stack
        self.odd = number == ODD

    def batch(self, step: int, of: int = 0) -> Tensor:
        """What this rank reads in a step."""
        generator = torch.Generator().manual_seed(1000 * step + 10 * of + self.number)
        return torch.randn(8, WIDTH, generator=generator)

    def train(
        self,
        model: nn.Module,
        between: Callable[[int], object] = lambda step: None,
        in_step: Callable[[int], object] = lambda step: None,
        steps: int = STEPS,
    ) -> None:
        """Train a model; `between` is called before a step, `in_step` between its backward and its update."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        for step in range(1, steps + 1):
            between(step)
            model(self.batch(step)).square().mean().backward()
            in_step(step)
            optimizer.step()
            optimizer.zero_grad()
            self.meet()


def network(*layers: nn.Module) -> nn.Module:
    """A model of all ranks, equal on all of them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), *layers, nn.Linear(WIDTH, 8))


def set_and_back(job: Job, owner: Any, name: str, value: object) -> None:
    job.stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def without_mkldnn(job: Job) -> None:
    """Another library multiplies matrices on one rank."""
    set_and_back(job, torch.backends.mkldnn, "enabled", not job.odd)


def low_precision(job: Job) -> None:
    """Matrices are multiplied in bfloat16 on one rank, where the processor can."""
    job.stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("medium" if job.odd else "highest")


def other_variable(job: Job) -> None:
    """A variable of a library differs, and so do the results that it gives."""
    if job.odd:
        job.stack.callback(os.environ.pop, "TORCH_SOME_LIBRARY", None)
        os.environ["TORCH_SOME_LIBRARY"] = "fast"
    without_mkldnn(job)


FLAGS = {"mkldnn": without_mkldnn, "precision": low_precision, "variable": other_variable}


def flagged(flag: str, job: Job, late: bool = False, compiled: bool = False) -> None:
    """A flag differs on one rank, from the beginning or from step 3 on."""

    def between(step: int) -> None:
        if step == (3 if late else 1):
            FLAGS[flag](job)

    model = network()
    if compiled:
        model.compile(backend="aot_eager")
    job.train(DistributedDataParallel(model), between)


PROGRAMS: dict[str, Callable[[Job], None]] = {
    **{f"flag {flag}": functools.partial(flagged, flag) for flag in FLAGS},
    "flag mkldnn late": functools.partial(flagged, "mkldnn", late=True),
    "flag precision late": functools.partial(flagged, "precision", late=True),
    "flag mkldnn compiled": functools.partial(flagged, "mkldnn", compiled=True),
}


def run(names: Sequence[str], folder: Path, world: int = 3, seconds: float = 300) -> dict[str, Any]:
    """The results of programs, by name."""
    command = [sys.executable, "-m", "guard.tests.support.innocent", str(world), str(folder), *names]
    run_together({"ranks": command}, seconds=seconds, folder=ROOT)
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def guarded(program: Callable[[Job], None], number: int, world: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Run a program under the guard."""
    meeting = Meeting(number, world, group, DETECTORS)
    rank = Rank(number, world, meeting.channel)  # type: ignore[arg-type]
    for kind in all_checks.CHECKS:
        if kind is not Times:
            rank.add(functools.partial(kind, rank, **SETTINGS))
    drains = [drain for check in rank.checks if (drain := getattr(check, "drain", None))]
    found = []

    def meet() -> None:
        for drain in drains:
            drain()
        found.extend(meeting.meet())

    rank.start()
    with ExitStack() as stack:
        program(Job(number, world, meet, stack))
        rank.close()
    meet()
    found += meeting.meet(last=True)
    return {
        "findings": [json.loads(finding.to_json()) for finding in found],
        "coverage": meeting.monitor.coverage.to_dict(),
    }


def work(folder: Path, world: int, names: Sequence[str], number: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=world)
    group = dist.new_group(list(range(world)))
    assert group is not None
    results = {}
    for name in names:
        results[name] = guarded(PROGRAMS[name], number, world, group)
        dist.barrier()
    if number == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # a thread of gloo that lets go of a tensor late must not meet an interpreter that is being finalized


def main(world: str, folder: str, *names: str) -> int:
    return ranks(int(world), functools.partial(work, Path(folder), int(world), names))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
