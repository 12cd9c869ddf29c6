"""Train on two processes, twice from the start: by DDP, FSDP2 or tensor parallelism over heads.

``python -m tests.support.parallel cpu ddp padded`` prints what came of it, a JSON object for each process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dash_inductor

from .forked import start
from .graphs import capture
from .hf_models import build, inputs_of
from .model_table import line

PROCESSES, LAYERS = 2, 3
BUCKETS = 8
"""Least number of buckets of DDP; each is compiled for itself."""

Compile = Callable[..., Any]


def by_ddp(model: nn.Module, compile: Compile) -> Callable[..., Any]:
    size = sum(p.numel() * p.element_size() for p in model.parameters()) / BUCKETS
    dist._DEFAULT_FIRST_BUCKET_BYTES = int(size)  # 1 MiB, where the model is larger
    parallel = DistributedDataParallel(model, bucket_cap_mb=size / 2**20)
    found: Callable[..., Any] = compile(parallel)
    return found


def by_fsdp(model: nn.Module, compile: Compile) -> Callable[..., Any]:
    """Each layer is compiled for itself and gathered for itself."""
    for layer in model.model.layers:
        layer.forward = compile(layer.forward)
        fully_shard(layer)
    fully_shard(model)
    return model


def by_heads(model: nn.Module, compile: Compile) -> Callable[..., Any]:
    """Tensor parallelism: each process has half of the query heads and half of the key/value heads."""
    device = next(model.parameters()).device.type
    plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    for layer in model.model.layers:
        parallelize_module(layer, init_device_mesh(device, (PROCESSES,)), plan)
    found: Callable[..., Any] = compile(model)
    return found


WAYS = {"ddp": by_ddp, "fsdp": by_fsdp, "heads": by_heads}

EXPECTED = {
    "ddp plain": "3 dense(0)",  # transformers makes a mask tensor in the first bucket's graph
    "ddp right": "3 dense(0)",
    "fsdp plain": "1 causal",
    "fsdp right": "1 dense(0)",
    "heads plain": "3 causal",
    "heads right": "3 causal & keys(0)",
}
"""The line of the records (`model_table.line`) of a process, by way and kind of inputs."""


def train(device: str, way: str, kind: str, compile: Compile) -> list[Tensor]:
    """The local gradients of this process after one step."""
    torch._dynamo.reset()
    model = build("Llama", layers=LAYERS, head_dim=16 if device == "cpu" else 64)
    model = model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    inputs = {name: tensor.to(device) for name, tensor in inputs_of("Llama", kind).items()}
    if way != "heads":
        inputs["input_ids"] = inputs["input_ids"].roll(dist.get_rank(), 1)  # each process has its own batch
    parallel = WAYS[way](model, compile)  # alive until the end of the backward: it is what adds the gradients
    parallel(**inputs).loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [(g.to_local() if isinstance(g, DTensor) else g).cpu() for g in gradients]


def work(rank: int, device: str, way: str, kind: str, folder: str) -> None:
    """One of the processes; it leaves its facts in a file of its own."""
    torch.use_deterministic_algorithms(True)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )
    with capture() as graphs:
        compile = graphs.compile if device == "cpu" else torch.compile
        first = train(device, way, kind, compile)
        records = dash_inductor.sites()
        second = train(device, way, kind, compile)
    facts = {
        "sites": line(records, calls=len(records)),
        "graphs": len(graphs.before) // 2,
        "equal": len(first) == len(second) and all(map(torch.equal, first, second)),
        "finite": all(bool(g.isfinite().all()) for g in first),
        "norm": float(sum(g.double().square().sum() for g in first)),
    }
    Path(folder, f"facts{rank}").write_text(json.dumps(facts), encoding="utf-8")
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that lets go of a tensor late must not meet an interpreter that is being finalized


def main(device: str, way: str, kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        start(work, (device, way, kind, folder), PROCESSES, device)
        for rank in range(PROCESSES):
            print(Path(folder, f"facts{rank}").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(*sys.argv[1:])
