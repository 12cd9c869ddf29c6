"""Train with DDP on several processes while recording, with a bit flipped in one gradient of one rank.

``python -m guard.tests.support.divergent cpu 3 folder`` makes one recording for each of `FAULTS`, and prints what
each rank raised, a JSON object for each process.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from unittest.mock import Mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dash_guard
from dash_guard.recorder import recorder
from dash_inductor.errors import DashError
from tests.support.forked import start

STEPS = 4
STEP, RANK, TENSOR = 3, 1, "2.weight"
"""The places of the faults."""

FAULTS = ("none", "again", "full", "fails", "before", "after", "raised")
"""Without a fault, twice; the disk of one rank is full, or its recorder raises an error; a bit flipped before gradients
are reduced, and after; again after, with replicas="raise"."""


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element of a contiguous float32 tensor, in place."""
    tensor.view(torch.int32).view(-1)[element] ^= 1 << bit


def train(device: str, rank: int, fault: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    step = 0

    def spoil(gradient: Tensor) -> Tensor:
        spoiled = gradient.clone()
        if (step, rank, fault) == (STEP, RANK, "before"):
            flip_bit(spoiled, element=5, bit=20)
        return spoiled

    def break_recorder(fault: str) -> None:
        if fault == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))  # of any file of this process
        elif fault == "fails":
            recorder.LaneBuffer.add = Mock(side_effect=torch.OutOfMemoryError("no memory"))  # type: ignore[method-assign]

    target = dict(model.named_parameters())[TENSOR]
    target.register_hook(spoil)
    for step in range(1, STEPS + 1):  # read by `spoil`
        inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(step * 100 + rank)).to(device)
        parallel(inputs).square().mean().backward()
        if (step, rank) == (STEP, RANK) and fault in ("after", "raised"):
            assert target.grad is not None
            flip_bit(target.grad, element=5, bit=20)
        if (step, rank) == (STEP, RANK):
            break_recorder(fault)
        optimizer.step()
        optimizer.zero_grad()


def work(rank: int, device: str, world: int, folder: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    raised, add = {}, recorder.LaneBuffer.add
    for fault in FAULTS:
        try:
            with dash_guard.record(f"{folder}/{fault}", replicas="raise" if fault == "raised" else "warn"):
                train(device, rank, fault)
        except DashError as error:
            raised[fault] = f"{type(error).__name__}: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            recorder.LaneBuffer.add = add  # type: ignore[method-assign]
    Path(folder, f"facts{rank}").write_text(json.dumps(raised), encoding="utf-8")
    dist.destroy_process_group()


def main(device: str, world: str, folder: str) -> None:
    start(work, (device, int(world), folder), int(world), device)
    for rank in range(int(world)):
        print(Path(folder, f"facts{rank}").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(*sys.argv[1:])
