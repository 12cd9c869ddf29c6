"""Trains one model in layouts of two ranks, recording values: ``python -m guard.tests.support.layouts FOLDER``.

Every step has the same batch of 8 in all layouts; `LAYOUTS` are the folders that it writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dash_guard
from tests.support.forked import start

STEPS = 4
LAYOUTS = ("ddp", "fsdp", "tp", "ddp sum", "tp wrong bias")
"""Data-parallel, sharded and tensor-parallel, of which all agree with one rank; then gradients that are added and not
averaged, and a bias that is added on both ranks of a tensor-parallel product."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def train(folder: str, forward: Callable[[Tensor], Tensor], parameters: nn.Module, rows: slice, factor: float) -> None:
    optimizer = torch.optim.SGD(parameters.parameters(), lr=0.1)
    with dash_guard.record(folder, values=True):
        for step in range(1, STEPS + 1):
            (forward(batch(step)[rows]).square().mean() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh, rows = init_device_mesh("cpu", (2,)), slice(4 * rank, 4 * rank + 4)
    for layout in LAYOUTS:
        whole = model()
        into, factor = f"{folder}/{layout}", 2.0 if layout == "ddp sum" else 1.0
        if layout.startswith("ddp"):
            train(into, DistributedDataParallel(whole), whole, rows, factor)
        elif layout == "fsdp":
            fully_shard(whole, mesh=mesh)
            train(into, whole, whole, rows, factor)
        else:
            parallelize_module(whole, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            forward: Callable[[Tensor], Tensor] = whole
            if layout == "tp wrong bias":
                forward = lambda x, whole=whole: whole(x) + whole[2].bias.full_tensor()  # noqa: E731
            train(into, forward, whole, slice(None), factor)
    dist.destroy_process_group()


if __name__ == "__main__":
    start(work, (sys.argv[1],), 2, "cpu")
