"""Processes with DDP and FSDP2 under the checks of collectives, some of which change a bit.

``python -m guard.tests.support.damaged_collectives WORLD FOLDER`` runs the trials of ``FOLDER/trials.json``, and rank 0
writes ``FOLDER/results.jsonl``.  Three ranks are no power of two: a mean that is rounded otherwise than DDP rounds it
changes bits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import json
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from dash_guard.checks.collective_checksums import CollectiveChecksums
from dash_guard.checks.gathered_parameters import GatheredParameters
from dash_guard.fingerprints.fingerprint import local
from dash_guard.process.rank import Rank
from tests.support.distribution import ROOT
from tests.support.forked import ranks
from tests.support.processes import run_together

from .planted import Meeting, flip

STEPS, AT = 5, 4
INPUT, OUTPUT = "input", "output"


@dataclass(frozen=True)
class Trial:
    """One short training run.

    Attributes:
        mode: "ddp", "replicate", "fsdp" or "hsdp"; "compiled fsdp", whose blocks are compiled; "accumulated hsdp", of
            which every second backward sums over its groups, from step 2 on; "summed hsdp", which divides sums itself.
        collectives: the setting of the checks.
        damaged: the collective that changes a bit, on rank 1 in step `AT`; "" for none.
        side: of the operator on which it does so.
        number: of the call of this operator in the step.
        own: the program has its own way to communicate.
        device: "cpu" or "cuda"; all trials of a job have the same.
    """

    mode: str
    collectives: int = 1
    damaged: str = ""
    side: str = INPUT
    number: int = 0
    own: bool = False
    device: str = "cpu"


def damage_in(trial: Trial) -> contextlib.AbstractContextManager[object]:
    """Changes a bit of what a collective is given, or of what it gives, once.

    DDP calls its collectives in C++, FSDP2 in Python.
    """
    return Dispatched(trial) if trial.mode == "ddp" else called(trial)


class Damage:
    """Counts the calls of a collective, and changes a bit in one of them."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.calls = trial, 0

    def next(self) -> bool:
        """Whether the call is the one."""
        self.calls += 1
        return self.calls == self.trial.number + 1

    def done(self, run: Callable[[], Any], given: Tensor, got: Tensor) -> Any:
        """The results of a call that ends here."""
        kept = given.clone()
        if self.trial.side == INPUT:
            flip(given, 5, 20)
        result = run()
        if self.trial.side == OUTPUT:
            flip(got, 5, 20)
        elif got is not given:
            given.copy_(kept)  # what the producer has is as it was
        return result


class Dispatched(TorchDispatchMode):
    """Damage to a call of an operator."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.damage = Damage(trial)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run() -> Any:
            result = func(*args, **(kwargs or {}))
            if is_it:
                result[-1].wait()
            return result

        is_it = func._schema.name == f"c10d::{self.damage.trial.damaged}" and self.damage.next()
        return self.damage.done(run, args[0][0], args[0][0]) if is_it else run()


FUNCTIONS = {
    "allreduce_": (("all_reduce",), "tensor", "tensor"),
    "_reduce_scatter_base_": (("reduce_scatter_single", "reduce_scatter_tensor"), "input", "output"),
    "_allgather_base_": (("all_gather_single", "all_gather_into_tensor"), "input_tensor", "output_tensor"),
}
"""The functions that call operators, the first of those names that PyTorch has (from 2.13 on, or before), with the
names of what they read and write."""


@contextlib.contextmanager
def called(trial: Trial) -> Iterator[None]:
    """Damage to a call of a function of `torch.distributed`."""
    names, reads, writes = FUNCTIONS[trial.damaged]
    name = next(name for name in names if hasattr(dist, name))
    plain, damage = getattr(dist, name), Damage(trial)

    @functools.wraps(plain)
    def broken(*args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            work = plain(*args, **kwargs)
            if work is not None:
                work.wait()
            return work

        if not damage.next():
            return plain(*args, **kwargs)
        given = inspect.signature(plain).bind(*args, **kwargs).arguments
        return damage.done(run, given[reads], given[writes])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, broken)
        yield


def own_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """A program's own comm hook: half of what DDP does."""
    work = dist.all_reduce(bucket.buffer().div_(2 * dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def build(trial: Trial, world: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(12, 6)).to(trial.device)
    if trial.mode == "ddp":
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.001)
        if trial.own:
            parallel.register_comm_hook(None, lambda state, bucket: own_hook(state, bucket))
        return parallel
    if trial.mode == "replicate":
        from torch.distributed._composable.replicate import replicate

        return replicate(model)
    mesh = None
    if "hsdp" in trial.mode:
        mesh = init_device_mesh(trial.device, (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for block in blocks:
        fully_shard(block, mesh=mesh)
        if "compiled" in trial.mode:
            block.compile(backend="aot_eager")
    fully_shard(model, mesh=mesh)
    if "summed" in trial.mode:
        for each in (model, *blocks):
            each.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    if trial.own:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

        class Gather(DefaultAllGather):
            pass

        class Scatter(DefaultReduceScatter):
            pass

        for each in (model, *blocks):
            each.set_custom_all_gather(Gather())  # type: ignore[operator]
            each.set_custom_reduce_scatter(Scatter())  # type: ignore[operator]
    return model


def train(trial: Trial, number: int, world: int, group: Any) -> dict[str, Any]:
    model = build(trial, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meeting = Meeting(number, world, group)
    rank = Rank(number, world, meeting.channel)
    rank.checks = [
        GatheredParameters(rank, collectives=trial.collectives),
        CollectiveChecksums(rank, collectives=trial.collectives),
    ]
    checks = list(rank.checks)
    rank.start()
    found = []
    for step in range(1, STEPS + 1):
        inputs = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + number))

        inputs = inputs.to(trial.device)
        faulty = trial.damaged and number == 1 and step == AT
        with damage_in(trial) if faulty else contextlib.nullcontext():
            micro = 2 if step == 2 or (step > 1 and "accumulated" in trial.mode) else 1
            for number_of in range(micro):
                if "accumulated" in trial.mode:
                    model.set_requires_all_reduce(number_of == micro - 1)  # type: ignore[operator]
                model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found += meeting.meet()
    if trial.mode == "ddp" and not trial.own:
        pickle.dumps(model)  # as without the guard
    rank.close()
    found += meeting.meet() + meeting.meet() + meeting.meet(last=True)
    model((torch.ones(4, 12) * number).to(trial.device)).sum().backward()  # the hooks remain, and ranks stay in step
    tensors = [local(each.detach()).cpu() for p in model.parameters() for each in (p, p.grad)]
    mine = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine.hex(), group=group)
    return {
        "bits": everyone,
        "findings": [json.loads(finding.to_json()) for finding in found],
        "coverage": meeting.monitor.coverage.to_dict(),
        "off": [check.name for check in checks if check not in rank.checks],
    }


def run(trials: Sequence[Trial], folder: Path, world: int = 3, seconds: float = 300) -> list[dict[str, Any]]:
    """The results of trials, which processes of their own run one after the other."""
    (folder / "trials.json").write_text(json.dumps([asdict(trial) for trial in trials]))
    command = [sys.executable, "-m", "guard.tests.support.damaged_collectives", str(world), str(folder)]
    run_together({"ranks": command}, seconds=seconds, folder=ROOT)
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def work(number: int, folder: Path, world: int) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    trials = json.loads((folder / "trials.json").read_text())
    backend = "gloo"
    if trials[0]["device"] == "cuda":
        backend = "nccl"
        torch.cuda.set_device(number)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=number, world_size=world)
    group = dist.new_group(list(range(world)), backend="gloo")
    for raw in trials:
        result = train(Trial(**raw), number, world, group)
        if number == 0:
            with open(folder / "results.jsonl", "a") as file:
                file.write(json.dumps(result) + "\n")
        dist.barrier(group=group)
    dist.destroy_process_group()


def main(world: str, folder: str) -> int:
    if json.loads(Path(folder, "trials.json").read_text())[0]["device"] == "cuda":
        torch.multiprocessing.spawn(work, (Path(folder), int(world)), int(world))
        return 0
    return ranks(int(world), lambda number: work(number, Path(folder), int(world)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
