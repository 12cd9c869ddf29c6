"""Programs without a defective machine that do what a guard may take for one.

``python -m guard.tests.support.innocent WORLD FOLDER NAME...`` runs `PROGRAMS` one after the other on WORLD ranks, and
rank 0 writes ``FOLDER/results.json``: by name, the findings and the coverage.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
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

from .planted import Meeting, flip

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


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def averaged(average: dict[str, Tensor], model: nn.Module) -> None:
    """Average the weights of a model as programs do that keep the average themselves."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            average[name].mul_(0.9).add_(parameter, alpha=0.1)


def by_data(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.data.copy_(value)


def by_numpy(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.detach().numpy()[...] = value.numpy()


def by_version(parameter: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def by_pointer(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.data = value


WRITES = {"data": by_data, "numpy": by_numpy, "version": by_version, "pointer": by_pointer}


def evaluating(write: str, job: Job) -> None:
    """Rank 0 evaluates averaged weights, which it exchanges for the trained ones and puts back."""
    model = DistributedDataParallel(network())
    inner = model.module
    average = values(inner)

    def between(step: int) -> None:
        averaged(average, inner)
        if job.number == 0 and step % 3 == 0:
            trained = {n: p.data if write == "pointer" else p.detach().clone() for n, p in inner.named_parameters()}
            for name, parameter in inner.named_parameters():
                WRITES[write](parameter, average[name])
            with torch.no_grad():
                inner(job.batch(step, 1))
            for name, parameter in inner.named_parameters():
                WRITES[write](parameter, trained[name])

    job.train(model, between)


def evaluating_a_copy(write: str, job: Job) -> None:
    """All ranks average weights in a copy of the model, and rank 0 evaluates it."""
    model = DistributedDataParallel(network())
    copied = copy.deepcopy(model.module).requires_grad_(False)

    def between(step: int) -> None:
        for mine, theirs in zip(copied.parameters(), model.module.parameters(), strict=True):
            WRITES[write](mine, torch.lerp(mine.detach(), theirs.detach(), 0.1))
        if job.number == 0 and step % 3 == 0:
            with torch.no_grad():
                copied(job.batch(step, 1))

    job.train(model, between)


def clamped(what: str, every: int, job: Job) -> None:
    """The program cuts weights or gradients on one rank, past their versions."""
    model = DistributedDataParallel(network())
    weight = model.module[0].weight

    def cut(of: str, step: int) -> None:
        if job.odd and of == what and step >= 4 and step % every == 0:
            (weight.grad if of == "gradients" else weight).data.clamp_(-1e-3, 1e-3)

    job.train(model, functools.partial(cut, "weights"), functools.partial(cut, "gradients"))


def averaging(job: Job, only: int | None = None, flips: int = 0) -> None:
    """The program keeps averaged weights itself, on all ranks or on one; a bit of one flips in step `flips`."""
    model = DistributedDataParallel(network())
    average = values(model.module) if only in (None, job.number) else {}

    def between(step: int) -> None:
        if average:
            averaged(average, model.module)
        if step == flips and job.odd:
            flip(average["0.weight"], 77, 20)

    job.train(model, between, steps=12)


def broken(module: nn.Module, first: int, element: int = 5) -> Callable[[int], None]:
    """A module computes a bit of its result wrongly from a step on, below PyTorch; called with each step."""
    forward, now = module.forward, [0]

    def call(*args: Any) -> Any:
        result = forward(*args)
        if now[0] >= first:
            flip(result, element, 12)
        return result

    module.forward = call  # type: ignore[method-assign]
    return functools.partial(now.__setitem__, 0)


def adversarial(job: Job, breaks: str = "", ratio: int = 1) -> None:
    """Two models with optimizers that take turns; a layer of one may be broken on rank `ODD` from step 4 on."""
    torch.manual_seed(0)
    makes = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    judges = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
    models = DistributedDataParallel(makes), DistributedDataParallel(judges)
    by = [torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False) for model in models]
    layers = {"generator": makes[0], "discriminator": judges[0]}
    tell = broken(layers[breaks], 4) if breaks and job.odd else lambda step: None
    for step in range(1, STEPS + 1):
        tell(step)
        for turn in range(ratio):
            fake = models[0](job.batch(step, turn)).detach()
            (models[1](fake).mean() - models[1](job.batch(step, 5 + turn)).mean()).backward()
            by[1].step()
            by[1].zero_grad()
        models[1](models[0](job.batch(step, 9))).mean().neg().backward()
        by[0].step()
        for optimizer in by:
            optimizer.zero_grad()
        job.meet()


def piped(job: Job) -> None:
    """Each rank has a stage of a model, of the same layers with other weights, and passes on what it computes."""
    torch.manual_seed(job.number)
    stage: nn.Module = nn.Sequential(nn.Embedding(7, WIDTH)) if job.number == 0 else nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        given = torch.ones(8, dtype=torch.int64) * (step % 7) if job.number == 0 else torch.empty(8, WIDTH)
        if job.number:
            dist.recv(given, job.number - 1)
            given.requires_grad_()
        result = stage(given)
        if job.number < job.world - 1:
            dist.send(result.detach(), job.number + 1)
            gradient = torch.empty(8, WIDTH)
            dist.recv(gradient, job.number + 1)
            result.backward(gradient)
        else:
            result.square().mean().backward()
        if job.number:
            dist.send(given.grad, job.number - 1)
        optimizer.step()
        optimizer.zero_grad()
        job.meet()


class Unrepeatable(nn.Module):
    """A layer that computes something else when it runs again."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why

    def forward(self, x: Tensor) -> Tensor:
        if self.why == "random":
            return x + torch.rand(x.shape, generator=GENERATOR)
        if self.why == "changed":
            return x * (1 + next(COUNTS) / 100)
        return torch.ops.dash_guard_test.noise(x)


GENERATOR = torch.Generator()
COUNTS = itertools.count(1)  # which is not put back


@torch.library.custom_op("dash_guard_test::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """Adds what is other in each run, and no state decides."""
    return x + int.from_bytes(os.urandom(2), "little") / 1000


noise.register_autograd(lambda context, gradient: gradient.clone())
UNREPEATABLE = {
    "random": "cannot be run again: rand", "changed": "cannot be run again: ", "operator": "not deterministic: "
}  # fmt: skip


def unrepeatable(why: str, job: Job) -> None:
    """Ranks do not repeat what they have computed."""
    GENERATOR.manual_seed(job.number)
    job.train(DistributedDataParallel(network(Unrepeatable(why))))


PROGRAMS: dict[str, Callable[[Job], None]] = {
    **{f"flag {flag}": functools.partial(flagged, flag) for flag in FLAGS},
    "flag mkldnn late": functools.partial(flagged, "mkldnn", late=True),
    "flag precision late": functools.partial(flagged, "precision", late=True),
    "flag mkldnn compiled": functools.partial(flagged, "mkldnn", compiled=True),
    **{f"evaluation {write}": functools.partial(evaluating, write) for write in WRITES},
    **{f"evaluation of a copy {write}": functools.partial(evaluating_a_copy, write) for write in WRITES},
    **{
        f"clamped {what} in every {every}": functools.partial(clamped, what, every)
        for what in ("weights", "gradients")
        for every in (1, 5)
    },
    "adversarial": adversarial,
    "adversarial 3:1": functools.partial(adversarial, ratio=3),
    "pipeline": piped,
    **{f"unrepeatable {why}": functools.partial(unrepeatable, why) for why in UNREPEATABLE},
    "averages": averaging,
    "averages on one rank": functools.partial(averaging, only=2),
}

FAULTS: dict[str, Callable[[Job], None]] = {
    "flipped average": functools.partial(averaging, flips=9),
    **{f"broken {which}": functools.partial(adversarial, breaks=which) for which in ("generator", "discriminator")},
}
"""Programs of the same kinds with a fault on rank `ODD`: a bit that flips, or a layer that computes wrongly."""


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
        gc.collect()  # what another program has left
        results[name] = guarded((PROGRAMS | FAULTS)[name], number, world, group)
        dist.barrier()
    if number == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # a thread of gloo that lets go of a tensor late must not meet an interpreter that is being finalized


def main(world: str, folder: str, *names: str) -> int:
    return ranks(int(world), functools.partial(work, Path(folder), int(world), names))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
