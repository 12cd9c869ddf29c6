"""A small language model in five kinds of parallelism, trained under the guard with faults planted into single ranks.

``python -m guard.tests.support.planted WORLD FOLDER`` runs the trials of ``FOLDER/trials.json`` on WORLD ranks, and
rank 0 writes ``FOLDER/results.jsonl``.  Messages are carried between two steps, by
collectives of a group of their own, so that what is found does not depend on time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from dash_guard.checks import all as all_checks
from dash_guard.checks import cross_rank_recompute
from dash_guard.checks.check import Check
from dash_guard.checks.cross_rank_recompute import CrossRankRecompute
from dash_guard.checks.recomputed_update import RecomputedUpdate
from dash_guard.checks.same_rank_recompute import SameRankRecompute
from dash_guard.detectors import all as all_detectors
from dash_guard.detectors.cross_rank_recompute import CrossRankRecomputeDetector
from dash_guard.detectors.detector import Detector, Job
from dash_guard.detectors.diagnosis import Diagnosis
from dash_guard.detectors.same_rank_recompute import SameRankRecomputeDetector
from dash_guard.monitor.monitor import Monitor
from dash_guard.process import lonely
from dash_guard.process.rank import Rank
from dash_guard.report.findings import Finding
from dash_guard.transport.channel import Local
from dash_guard.transport.messages import Message, decode
from tests.support.distribution import ROOT
from tests.support.forked import ranks
from tests.support.processes import run_together

WIDTH, HEADS, VOCABULARY, BLOCKS, LENGTH = 32, 4, 64, 2, 12
MODES = ("ddp", "fsdp", "hsdp", "tp", "replicate")
DETECTORS = (SameRankRecomputeDetector, CrossRankRecomputeDetector, Diagnosis)
"""The detectors that run after `all_detectors.BITS`."""

OFF = {"same_rank_recompute": 0, "cross_rank_recompute": 0}
"""What needs all ranks at the same place is not a part of a trial by default."""

cross_rank_recompute.AGREE = 2  # a trial has few steps
lonely.USUAL, lonely.EXTRA = 4.0, 2.0  # and they are short


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class LanguageModel(nn.Module):
    def __init__(self, variant: str = "") -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("pos", torch.randn(16, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        if variant == "batch norm":
            self.norm = nn.BatchNorm1d(LENGTH)
        if variant == "frozen":
            self.emb.requires_grad_(False)
            self.blocks[0].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens) + self.pos[: tokens.shape[1]]
        if hasattr(self, "norm"):
            x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


VARIANTS = {
    "ddp": ("batch norm", "accumulate", "micro-batches", "clip", "frozen", "two optimizers", "zero", "scaler"),
    "fsdp": ("mixed precision", "accumulate", "clip", "with tp", "frozen", "schedule", "scaler", "own settings"),
    "hsdp": ("mixed precision", "clip", "accumulate", "schedule"),
    "tp": ("sequence", "clip", "two optimizers"),
    "replicate": ("accumulate", "batch norm"),
}
"""What else programs do, by mode; none of it may be taken for a fault."""


def build(mode: str, world: int, variant: str = "") -> tuple[nn.Module, LanguageModel]:
    """The model as it is called, and the model inside."""
    torch.manual_seed(0)
    model = LanguageModel(variant)
    if mode == "ddp":
        return DistributedDataParallel(model), model
    if mode in ("fsdp", "hsdp"):
        _shard(model, mode, world, variant)
    elif mode == "tp":
        _parallelize(model, init_device_mesh("cpu", (world,)), variant)
    elif mode == "replicate":
        from torch.distributed._composable.replicate import replicate

        replicate(model)
    return model, model


def _shard(model: LanguageModel, mode: str, world: int, variant: str) -> None:
    more: dict[str, Any] = {}
    if variant == "mixed precision":
        more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        more["reshard_after_forward"] = False
    if mode == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif variant == "with tp":
        both = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("shard", "heads"))
        _parallelize(model, both["heads"], variant)
        mesh = both["shard"]
    else:
        mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **more)
    fully_shard(model, mesh=mesh, **more)


def _parallelize(model: LanguageModel, mesh: DeviceMesh, variant: str) -> None:
    plan: dict[str, Any] = {f"attn.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"attn.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    if variant == "sequence":
        plan |= {"ln2": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1))}
    parts = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
    for block in model.blocks:
        if variant == "sequence":
            parallelize_module(block, mesh, {"ln2": parts})
        parallelize_module(block, mesh, plan)


@dataclass
class Trial:
    """One short training run.

    Attributes:
        mode: one of `MODES`.
        kind: of the fault, a key of `guard.tests.kinds.KINDS`; "clean".
        rank, step: where it is planted.
        seed: chooses tensor, element and bit.
        settings: of checks.
        variant: one of `VARIANTS`.
        steps: of the run.
        fact: what was planted, filled in by the run.
    """

    mode: str
    kind: str = "clean"
    rank: int = 0
    step: int = 7
    seed: int = 0
    settings: dict[str, int] = field(default_factory=dict)
    steps: int = 10
    variant: str = ""
    fact: dict[str, Any] = field(default_factory=dict)


def as_it_is(batch: Tensor) -> Tensor:
    return batch


@dataclass
class Run:
    """What a fault can be planted into."""

    trial: Trial
    number: int
    called: nn.Module
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    read: Callable[[Tensor], Tensor] = as_it_is

    @property
    def here(self) -> bool:
        return self.number == self.trial.rank


def flip(tensor: Tensor, index: int, bit: int) -> None:
    """Flip a bit of an element of a tensor in place, as a machine does: no operator runs, where that can be done."""
    raw = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    size = raw.element_size()
    bit %= 8 * size - 1
    if raw.is_contiguous() and raw.device.type == "cpu":
        byte = ctypes.c_uint8.from_address(raw.data_ptr() + index % raw.numel() * size + bit // 8)
        byte.value ^= 1 << bit % 8
        return
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[size]
    words = raw.detach().reshape(-1).clone().view(width)
    words[index % words.numel()] ^= 1 << bit
    raw.detach().data.copy_(words.view(raw.dtype).view_as(raw))


class Carried:
    """A channel whose messages wait until all ranks meet."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.asked: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message.encode())

    def orders(self) -> list[Message]:
        orders, self.asked = self.asked, []
        return orders

    def close(self) -> None:
        pass


class Meeting:
    """Carries messages of all ranks to the monitor of rank 0, and what it asks back."""

    def __init__(
        self,
        number: int,
        world: int,
        group: dist.ProcessGroup,
        kinds: Sequence[type[Detector]] = (*all_detectors.BITS, *DETECTORS),
    ):
        self.number, self.world, self.group, self.channel = number, world, group, Carried()
        self.local, self.time, self.largest = Local(), 0.0, 0
        job = Job(world)
        detectors = [kind(job) for kind in kinds]
        self.monitor = Monitor(job, self.local, detectors, None, lambda finding: None, lambda: 0.0)

    def meet(self, last: bool = False) -> list[Finding]:
        """All ranks call it, between two steps."""
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, self.channel.sent, group=self.group)
        self.channel.sent = []
        found: list[Finding] = []
        asked: list[Any] = [None]
        if self.number == 0:
            self.time += 1.0
            for messages in everyone:
                for content in messages:
                    self.largest = max(self.largest, len(content))
                    self.local.end(0).send(decode(content, self.world))
            found = self.monitor.turn(self.time)
            self.monitor._take(self.time)  # what has just been asked
            if last:
                found += self.monitor.finish(self.time)
            asked = [[self.local.end(rank).orders() for rank in range(self.world)]]
        dist.broadcast_object_list(asked, src=0, group=self.group)
        self.channel.asked += asked[0][self.number]
        return found


def tokens(trial: Trial, number: int, step: int) -> Tensor:
    """What a rank reads; ranks that share a model's heads read the same."""
    reader = 0 if trial.mode == "tp" else number // 2 if trial.variant == "with tp" else number
    generator = torch.Generator().manual_seed(1000003 * step + reader)
    return torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)


def _unreduced(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Gradients are not reduced within."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()

    @contextlib.contextmanager
    def off() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return off()


def _clip(parameters: Sequence[Tensor]) -> None:
    """Scale gradients, as programs do that clip by value: each rank its own part."""
    torch.nn.utils.clip_grad_value_(parameters, 0.01, foreach=False)


class Updates:
    """How a program updates: by one or two optimizers, with a schedule, or by a scaler that overflows once."""

    def __init__(self, trial: Trial, number: int, trained: list[Tensor]) -> None:
        variant = trial.variant
        cut = len(trained) // 2 if variant == "two optimizers" else 0
        self.by: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(part, lr=1e-2, foreach=False) for part in (trained[cut:], trained[:cut]) if part
        ]
        if variant == "zero":
            self.by = [ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=1e-2)]
        elif variant == "own settings":  # each rank divides parameters in its own way
            parts = [trained[: number + 1], trained[number + 1 :]]
            groups = [{"params": part, "lr": 1e-3 * (1 + number)} for part in parts]
            self.by = [torch.optim.AdamW(groups, foreach=False)]
        elif variant == "schedule":
            self.by = [torch.optim.AdamW(trained, lr=torch.tensor(1e-2), foreach=False)]
        self._schedule = (
            torch.optim.lr_scheduler.OneCycleLR(self.by[0], 1e-2, total_steps=trial.steps + 1)
            if variant == "schedule"
            else None
        )
        self._scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=2) if variant == "scaler" else None

    def backward(self, loss: Tensor, step: int) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss) * (float("inf") if step == 4 else 1)
        loss.backward()

    def update(self) -> None:
        for optimizer in self.by:
            if self._scaler is not None:
                self._scaler.step(optimizer)
                self._scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        if self._schedule is not None:
            self._schedule.step()


def train(trial: Trial, number: int, world: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Run a trial; what was found, on rank 0."""
    from ..kinds import KINDS

    called, model = build(trial.mode, world, trial.variant)
    trained = [parameter for parameter in called.parameters() if parameter.requires_grad]
    updates = Updates(trial, number, trained)
    run = Run(trial, number, called, model, updates.by[0])
    plant = KINDS[trial.kind].plant if trial.kind != "clean" else None
    meeting = Meeting(number, world, group)
    rank = Rank(number, world, meeting.channel)
    settings = OFF | trial.settings
    more = (
        (RecomputedUpdate, "same_rank_recompute"),
        (SameRankRecompute, "same_rank_recompute"),
        (CrossRankRecompute, "cross_rank_recompute"),
    )
    together = [kind for kind, name in more if settings[name]]
    checks: list[Check] = [kind(rank, **settings) for kind in (*all_checks.BITS, *together)]
    rank.checks = list(checks)
    rank.start()
    found: list[tuple[float, Finding]] = []
    began = time.perf_counter()
    lasting = contextlib.ExitStack()  # what a fault has put on, if it persists
    for step in range(1, trial.steps + 1):
        with contextlib.ExitStack() as stack:
            moments = ("begin", "reduced", "stepped")

            def at(moment: str, step: int = step, stack: contextlib.ExitStack = stack) -> None:
                if plant is not None and step == trial.step:
                    fact = plant(run, moment, lasting if KINDS[trial.kind].persists else stack)
                    if fact:
                        trial.fact = fact

            at(moments[0])
            micro = 2 if trial.variant in ("accumulate", "micro-batches") else 1
            for part in range(micro):
                batch = run.read(tokens(trial, number, step * micro + part))
                unreduced = trial.variant == "accumulate" and part < micro - 1
                with _unreduced(called) if unreduced else contextlib.nullcontext():
                    loss = F.cross_entropy(called(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                    updates.backward(loss, step)
            if trial.variant == "clip":
                _clip(trained)
            at(moments[1])
            updates.update()
            at(moments[2])
        found += [(step, finding) for finding in meeting.meet()]
    seconds = time.perf_counter() - began
    rank.close()
    lasting.close()
    found += [(trial.steps, finding) for finding in meeting.meet()]
    found += [(trial.steps, finding) for finding in meeting.meet(last=True)]
    facts: list[Any] = [None] * world
    dist.all_gather_object(facts, trial.fact, group=group)
    trial.fact = facts[trial.rank]
    return {
        "trial": asdict(trial),
        "findings": [json.loads(finding.to_json()) for _, finding in found],
        "when": [step for step, _ in found],
        "coverage": meeting.monitor.coverage.to_dict(),
        "off": [check.name for check in checks if check not in rank.checks],
        "largest": meeting.largest,
        "step_ms": round(seconds / trial.steps * 1e3, 1),
    }


def run(trials: Sequence[Trial], folder: Path, world: int = 4, seconds: float = 600) -> list[dict[str, Any]]:
    """The results of trials, which processes of their own run one after the other."""
    (folder / "trials.json").write_text(json.dumps([asdict(trial) for trial in trials]))
    command = [sys.executable, "-m", "guard.tests.support.planted", str(world), str(folder)]
    run_together({"ranks": command}, seconds=seconds, folder=ROOT)
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def work(folder: Path, world: int, number: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=world)
    group = dist.new_group(list(range(world)))
    assert group is not None
    for raw in json.loads((folder / "trials.json").read_text()):
        result = train(Trial(**raw), number, world, group)
        if number == 0:
            with open(folder / "results.jsonl", "a") as file:
                file.write(json.dumps(result) + "\n")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(ranks(int(sys.argv[1]), functools.partial(work, Path(sys.argv[2]), int(sys.argv[1]))))
