"""Train small models on several processes under checks of the guard, with a defect planted in one rank.

``python -m guard.tests.support.recomputed WORLD FOLDER < trials.json`` runs a list of `Trial` one after the other in
one start of the processes, and prints the findings and the coverage of each, a JSON object for each line.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dash_guard.checks.cross_rank_recompute import CrossRankRecompute
from dash_guard.checks.replicas import Replicas
from dash_guard.checks.same_rank_recompute import SameRankRecompute
from dash_guard.checks.stop import Stop
from dash_guard.detectors.cross_rank_recompute import CrossRankRecomputeDetector
from dash_guard.detectors.detector import Job
from dash_guard.detectors.diagnosis import Diagnosis
from dash_guard.detectors.same_rank_recompute import SameRankRecomputeDetector
from dash_guard.errors import FaultConfirmedError
from dash_guard.monitor.monitor import Monitor
from dash_guard.process.rank import Rank
from dash_guard.report.findings import Finding
from dash_guard.transport.channel import Local
from dash_guard.transport.messages import Message
from dash_inductor.upstream.dispatch import disable_current_modes
from tests.support.forked import ranks

WIDTH, HEADS, WORDS, BLOCKS, LENGTH = 32, 4, 64, 2, 13
LEAVES = ("blocks.0.attn.q", "blocks.1.up", "blocks.0.ln1", "blocks.1.down", "head", "blocks.1.attn.out", "emb")


@dataclass(frozen=True)
class Trial:
    """One training run.

    Attributes:
        mode: "ddp", "fsdp", "hsdp", "tp", "replicate".
        kind: "clean"; "forward" and "backward": a bit of a module's result, or of its gradient, is flipped below
            PyTorch, so that no operator shows it; "operator": of the result of an operator; "unseeded": random numbers
            from a generator of the program's own; "set": ranks add in different orders; "local": of the gradient
            of the module's weight, as this rank has computed it; "reduced": before the optimizer uses it.
        rank, module, bit, element: where.
        first: the step from which on it strikes.
        once: strikes at the first execution only.
        loss: the model returns its loss.
        noisy: it has dropout, and buffers that the forward changes.
        every, same_rank_recompute: settings of cross-rank recomputes and same-rank recomputes.
        stop: training ends after a confirmed fault, which this rank alone receives in step `first` if there is no
            fault.
    """

    mode: str = "ddp"
    kind: str = "clean"
    rank: int = 0
    module: str = "head"
    bit: int = 12
    element: int = 5
    first: int = 2
    once: bool = False
    loss: bool = False
    device: str = "cpu"
    noisy: bool = False
    compiled: bool = False
    micro_batches: int = 1
    steps: int = 4
    every: int = 1
    same_rank_recompute: int = 0
    stop: bool = False


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, noisy: bool) -> None:
        super().__init__()
        self.ln1, self.ln2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1 if noisy else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.ln2(x)))))


class Language(nn.Module):
    """A small language model; noisy: with dropout, and with buffers that the forward changes."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("pos", torch.randn(16, WIDTH) * 0.1)
        self.norm = nn.BatchNorm1d(WIDTH) if trial.noisy else nn.Identity()
        self.blocks = nn.ModuleList(Block(trial.noisy) for _ in range(BLOCKS))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.loss = trial.loss

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens[:, :-1] if self.loss else tokens)
        x = self.norm((x + self.pos[: x.shape[1]]).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = self.between(block(x))
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) if self.loss else logits

    def between(self, x: Tensor) -> Tensor:
        return x


def build(trial: Trial, world: int) -> tuple[nn.Module, Language]:
    """The model as the program calls it, and what is inside."""
    torch.manual_seed(0)
    model = Language(trial).to(trial.device)
    called: nn.Module = torch.compile(model, backend="aot_eager") if trial.compiled else model
    if trial.mode == "ddp":
        called = DistributedDataParallel(called)
    elif trial.mode in ("fsdp", "hsdp"):
        sizes, names = ((world,), ("s",)) if trial.mode == "fsdp" else ((2, world // 2), ("r", "s"))
        mesh = init_device_mesh(trial.device, sizes, mesh_dim_names=names)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif trial.mode == "replicate":
        from torch.distributed._composable.replicate import replicate

        replicate(model)
    elif trial.mode == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh(trial.device, (2, world // 2), mesh_dim_names=("d", "t"))
        for block in model.blocks:
            columns = {name: ColwiseParallel() for name in ("attn.q", "attn.k", "attn.v", "up")}
            rows = {name: RowwiseParallel() for name in ("attn.out", "down")}
            parallelize_module(block, mesh["t"], {**columns, **rows})
        fully_shard(model, mesh=mesh["d"])
    return called, model


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit of a dense tensor in memory; no mode of PyTorch learns of it."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if tensor.is_cuda:
        with torch.no_grad(), disable_current_modes():
            words = tensor.detach().view(-1).view(torch.int32)
            words[element % words.numel()] ^= 1 << (bit % 31)
        return
    size = tensor.element_size()
    address = tensor.data_ptr() + element % tensor.numel() * size
    byte = ctypes.c_uint8.from_address(address + bit % (8 * size - 1) // 8)
    byte.value ^= 1 << bit % 8


current: list[Fault] = []
"""The last of them is asked by the operator below."""


@torch.library.custom_op("dash_inductor_test::between", mutates_args=())
def between(x: Tensor) -> Tensor:
    """A copy; with a fault in the rank that a trial names."""
    result = x.clone()
    if current[-1]._on():
        flip(result, current[-1].trial.element, current[-1].trial.bit)
    return result


between.register_autograd(lambda context, gradient: gradient.clone())


class Fault:
    """Plants the fault of a trial."""

    def __init__(self, trial: Trial, rank: int, model: Language) -> None:
        self.trial, self.rank, self.step, self.struck = trial, rank, 0, False
        self.handles = []
        if trial.kind in ("forward", "backward") and trial.compiled:
            self.handles.append(model.get_submodule(trial.module).register_forward_hook(self._strike))
        elif trial.kind in ("forward", "backward"):  # inside of the module, as a kernel that computes wrongly
            module = model.get_submodule(trial.module)
            module.forward = functools.partial(self._call, module.forward)  # type: ignore[method-assign]
        elif trial.kind == "local":
            module = model.get_submodule(trial.module)
            self._watched = {id(p) for p in module.parameters() if isinstance(p, DTensor)}  # a shard: no autograd of it
            self._watch_weight(module)
            self.handles.append(module.register_forward_pre_hook(self._watch_weight))
        elif trial.kind == "operator":
            current.append(self)
            model.between = torch.ops.dash_inductor_test.between  # type: ignore[method-assign]
        elif trial.kind == "unseeded":
            generator = torch.Generator().manual_seed(rank)
            draw = functools.partial(torch.rand, generator=generator)  # inside of which no check looks
            model.between = lambda x: x + draw(x.shape) * 1e-3  # type: ignore[method-assign]
        elif trial.kind == "set":
            model.between = self._in_some_order  # type: ignore[method-assign]

    def _on(self) -> bool:
        trial = self.trial
        on = self.rank == trial.rank and trial.first <= self.step
        if on and trial.once and self.struck:
            return False
        self.struck |= on
        return on

    def _watch_weight(self, module: nn.Module, args: Any = None) -> None:
        """FSDP2 puts other tensors into the place of parameters, with tensor parallelism DTensors too."""
        weight = module.weight
        if isinstance(weight, Tensor) and id(weight) not in self._watched:
            self._watched.add(id(weight))
            weight.register_hook(self._strike_back)

    def _call(self, forward: Callable[..., Tensor], *args: Any) -> Tensor:
        result = forward(*args)
        self._strike(None, args, result)
        return result

    def _strike(self, module: nn.Module | None, args: Any, result: Tensor) -> None:
        if self.trial.kind == "backward":
            result.register_hook(self._strike_back)
        elif self._on():
            flip(result, self.trial.element, self.trial.bit)

    def _strike_back(self, gradient: Tensor) -> None:
        if self._on():
            flip(gradient, self.trial.element, self.trial.bit)

    def _in_some_order(self, x: Tensor) -> Tensor:
        parts = [x * 0.3, x * 1e-3, x * 0.7]
        order = [(n * (self.rank + 1) + self.rank) % 3 for n in range(3)] if self.rank % 3 < 2 else [2, 1, 0]
        total = torch.zeros_like(x)
        for n in order:
            total = total + parts[n]
        return total + x


def batch(trial: Trial, rank: int, world: int, step: int, micro: int) -> Tensor:
    of = rank // (world // 2) if trial.mode == "tp" else rank
    generator = torch.Generator().manual_seed(1_000_003 * step + 101 * micro + of)
    return torch.randint(WORDS, (2, LENGTH), generator=generator)


def train(trial: Trial, rank: int, world: int, guarded: Rank | None, raised: list[tuple[int, str]]) -> tuple[str, bool]:
    """Train; a digest of this rank's parameters and buffers in the end, and whether the fault has struck here."""
    called, model = build(trial, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    fault = Fault(trial, rank, model)
    torch.manual_seed(rank)
    if guarded is not None:
        guarded.start()
    for step in range(1, trial.steps + 1):
        fault.step = step
        if guarded is not None and trial.stop and trial.kind == "clean" and (step, rank) == (trial.first, trial.rank):
            guarded.checks[-1].order(Message("stop", 0, step, {"sentence": "rank 7 computes wrongly"}))
        for micro in range(trial.micro_batches):
            tokens = batch(trial, rank, world, step, micro).to(trial.device)
            if trial.loss:
                loss = called(tokens)
            else:
                loss = F.cross_entropy(called(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        if trial.kind == "reduced" and fault._on():
            flip(model.get_submodule(trial.module).weight.grad, trial.element, trial.bit)  # type: ignore[arg-type]
        try:
            optimizer.step()
        except FaultConfirmedError as error:
            raised.append((step, str(error)))
            break
        optimizer.zero_grad()
    if guarded is not None:
        guarded.close()
    for handle in fault.handles:
        handle.remove()
    end = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers(), torch.get_rng_state()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        end.update(local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return end.hexdigest(), fault.struck


def run(trial: Trial, rank: int, world: int) -> dict[str, Any]:
    """Train with and without the guard."""
    local = Local()
    guarded = Rank(rank, world, local.end(rank))
    guarded.checks = [CrossRankRecompute(guarded, cross_rank_recompute=trial.every)]
    if trial.same_rank_recompute:
        guarded.checks.append(SameRankRecompute(guarded, same_rank_recompute=trial.same_rank_recompute))
    if trial.stop:
        replicas = Replicas(guarded)
        guarded.checks += [replicas, Stop(guarded, replicas)]
    raised: list[tuple[int, str]] = []
    end, struck = train(trial, rank, world, guarded, raised)
    ends = [end]
    if trial.kind == "clean":
        ends.append(train(trial, rank, world, None, raised)[0])
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (local.receive(), ends, struck, raised))
    merged, job, published = Local(), Job(world), list[Finding]()
    for messages, *_ in everyone:
        for message in messages:
            merged.end(message.rank).send(message)
    detectors = [CrossRankRecomputeDetector(job), SameRankRecomputeDetector(job), Diagnosis(job)]
    monitor = Monitor(job, merged, detectors, None, published.append, lambda: 0.0)
    monitor.turn(0.0)
    monitor.finish(60.0)
    return {
        "trial": asdict(trial),
        "findings": [asdict(finding) for finding in published],
        "coverage": monitor.coverage.to_dict(),
        "unchanged": all(len(set(ends)) == 1 for _, ends, *_ in everyone),
        "struck": [struck for *_, struck, _ in everyone],
        "raised": [raised for *_, raised in everyone],
    }


def work(rank: int, world: int, folder: str, trials: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    on_gpu = any(trial.get("device") == "cuda" for trial in trials)
    if on_gpu:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    with open(Path(folder, f"results{rank}"), "w", encoding="utf-8") as file:
        for trial in trials:
            file.write(json.dumps(run(Trial(**trial), rank, world)) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main(world: str, folder: str) -> None:
    trials = json.load(sys.stdin)
    arguments = int(world), folder, trials
    if any(trial.get("device") == "cuda" for trial in trials):
        multiprocessing.spawn(work, arguments, int(world))
    elif ranks(int(world), lambda rank: work(rank, *arguments)):
        sys.exit(1)
    print(Path(folder, "results0").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
