"""Attention under context parallel on several processes: records, gradients beside double precision, and bits.

``python -m tests.passes.attention.context_parallel cpu 4 1 two four`` prints a JSON object for each process.
On CPU, the operators are those of FlashAttention for CUDA, which our executor takes the place of.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import _attention as context
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as implementation
from torch.distributed.tensor.parallel import parallelize_module

import dash_inductor

from ...support.forked import start
from ...support.graphs import capture

HEADS, KV_HEADS, BATCH = 4, 2, 2
Compile = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A way of splitting one causal attention.

    Attributes:
        parts: ranks that have the keys together.
        rotate: how they are moved, "allgather" or "alltoall".
        balanced: whether every rank has a part of the beginning and a part of the end.
        causal: whether the mask is causal.
        plan: whether a module is split, instead of the function for all of the program.
        own_batch: whether groups of ranks have batch elements of their own, instead of all of them.
    """

    parts: int
    rotate: str = "allgather"
    balanced: bool = True
    causal: bool = True
    plan: bool = False
    own_batch: bool = False


CASES = {
    "two": Case(2),
    "two turned": Case(2, rotate="alltoall", plan=True),
    "two apart": Case(2, own_batch=True),
    "two in order": Case(2, balanced=False),
    "two full": Case(2, balanced=False, causal=False),
    "four": Case(4),
    "four turned": Case(4, rotate="alltoall", plan=True),
    "four in order": Case(4, rotate="alltoall", balanced=False),
}


def flash(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    """`scaled_dot_product_attention` by the operator of FlashAttention, on any device."""
    given = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, options["is_causal"])
    out: Tensor = given[0]
    return out


flash.__name__ = F.scaled_dot_product_attention.__name__  # under which context parallel puts it back


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal, enable_gqa=True)


def tensors(device: str) -> list[Tensor]:
    """query, key, value and the gradient of the output, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    # On CPU, PyTorch's sigmoid has other bits at the end of a row that does not fill a vector.
    length, dim, dtype = (64, 16, torch.float32) if device == "cpu" else (1024, 64, torch.bfloat16)
    found = [torch.randn(BATCH, h, length, dim, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [t.to(device, dtype) for t in found]


def exact(given: list[Tensor], causal: bool) -> list[Tensor]:
    """Output and gradients of query, key and value in double precision."""
    *inputs, grad = [t.double().cpu() for t in given]
    inputs = [t.requires_grad_() for t in inputs]
    query, *others = inputs
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in others)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    out = scores.softmax(-1) @ value
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def own(tensor: Tensor, rank: int, case: Case) -> Tensor:
    """The part that a rank has of the length."""
    if not case.balanced:
        return tensor.chunk(case.parts, 2)[rank]
    chunks = tensor.chunk(2 * case.parts, 2)
    return torch.cat([chunks[rank], chunks[2 * case.parts - 1 - rank]], 2)


@contextmanager
def _parallel(model: nn.Module, mesh: DeviceMesh, case: Case, shards: list[Tensor]) -> Iterator[None]:
    """Within it, attention is that of all ranks of the mesh; `shards` are what this one has of the tensors."""
    context.set_rotate_method(case.rotate)
    implementation._cp_options.enable_load_balance = case.balanced
    if not case.plan:
        whole = [torch.zeros_like(shards[0]).repeat(1, 1, case.parts, 1)]
        with context_parallel(mesh, buffers=whole, buffer_seq_dims=[2], no_restore_buffers=set(whole)):
            yield
        return
    kind = implementation._ContextParallel.AttentionType.SDPA
    implementation._dispatch_mode = implementation._DispatchMode.MODULE_WRAPPER
    parallelize_module(model, mesh, implementation._ContextParallel(seq_dim=2, attention_type=kind))
    implementation._enable_context_parallel_dispatcher()
    yield
    implementation._disable_context_parallel_dispatcher()


def facts_of(case: Case, device: str, compile: Compile, repeats: int) -> dict[str, Any]:
    """What became of one case on this rank."""
    torch._dynamo.reset()
    dash_inductor.clear_sites()
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world // case.parts, case.parts), mesh_dim_names=("batch", "keys"))
    group, rank = mesh.get_coordinate() or (0, 0)
    batch = slice(group, group + 1) if case.own_batch else slice(None)
    given = tensors(device)
    *shards, grad = [own(t, rank, case)[batch].contiguous() for t in given]
    model = Attention(case.causal)
    results = []
    with _parallel(model, mesh["keys"], case, shards):
        compiled = compile(model)
        for _ in range(repeats):
            inputs = [t.detach().requires_grad_() for t in shards]
            out = compiled(*inputs)
            out.backward(grad)
            results.append([out.detach(), *(t.grad for t in inputs if t.grad is not None)])
    true = [own(t, rank, case)[batch] for t in exact(given, case.causal)]
    norms = [float((ours.cpu() - t).norm() / t.norm()) for ours, t in zip(results[0], true, strict=True)]
    records = [asdict(r) | {"plan": str(r.plan)} for r in dash_inductor.sites()]
    return {
        "records": [
            {name: r[name] for name in ("status", "kind", "forward", "mask", "detail", "line")} for r in records
        ],
        "error": max(norms),
        "equal": all(torch.equal(a, b) for result in results for a, b in zip(results[0], result, strict=True)),
        "digests": [[digest(t[i]) for t in results[0]] for i in range(len(shards[0]))],
        "group": group,
        "rank": rank,
    }


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def work(rank: int, device: str, world: int, names: list[str], repeats: int, folder: str) -> None:
    """One of the processes; it leaves its facts in a file of its own."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        F.scaled_dot_product_attention = flash
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    with capture() as graphs:
        compile = graphs.compile if device == "cpu" else torch.compile
        facts = {name: facts_of(CASES[name], device, compile, repeats) for name in names}
    Path(folder, f"facts{rank}").write_text(json.dumps(facts), encoding="utf-8")
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that lets go of a tensor late must not meet an interpreter that is being finalized


def main(device: str, world: str, repeats: str, *names: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        start(work, (device, int(world), list(names), int(repeats), folder), int(world), device)
        for rank in range(int(world)):
            print(Path(folder, f"facts{rank}").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(*sys.argv[1:])
