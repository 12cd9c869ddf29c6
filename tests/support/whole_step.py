"""Three training steps, whose results are printed as digests by name; `python -m tests.support.whole_step`.

    ... [--device cuda] [--default] [--distort inverse] [--model gpt2] [--how thread dynamic ...]

Without a model it is `Model`, whose kernels are of every kind that is chosen by timing somewhere.  With RANK and
WORLD_SIZE in the environment, processes train together, over gloo.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config
from torch.utils.checkpoint import checkpoint

HOW = ("thread", "dynamic", "graphs", "checkpoint", "scalars", "ddp", "fsdp")
"""Backwards on another thread, dynamic shapes, CUDA graphs, a part computed again, a number read from a tensor inside
of the graph, and the two ways in which processes train together."""


class Model(nn.Module):
    """Whatever is chosen by timing somewhere: pointwise kernels, reductions, products, scans, kernels of its own."""

    def __init__(self, how: Sequence[str], device: str) -> None:
        super().__init__()
        self.how, self.device = how, device
        self.embed = nn.Embedding(1009, 256)
        self.norm = nn.LayerNorm(256)
        self.qkv = nn.Linear(256, 768)
        self.mlp = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        self.head = nn.Linear(256, 1009, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (4, 64)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def think(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.attend(self.norm(self.embed(tokens)))
        again = "checkpoint" in self.how
        x = checkpoint(self.think, x, use_reentrant=False) if again else self.think(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())
        if "scalars" in self.how:
            loss = loss * (1 + 1 / (2 + tokens.max().item()))
        noise = x.detach().float().flatten().cumsum(0)[:: x.shape[2]]
        if self.device == "cuda" and "graphs" not in self.how:
            from .autotuned import row_sums

            noise = noise + row_sums(x.detach().flatten(0, 1).float())
        return loss + 1e-6 * (noise * x.float().flatten(0, 1).mean(1)).mean()


def digest(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return hashlib.sha256(whole.detach().cpu().float().numpy().tobytes()).hexdigest()[:16]


def made(name: str, how: Sequence[str], device: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of 16 bits, and what it is given."""
    torch.manual_seed(0)
    if name:
        from .small_models import MODELS

        with torch.device(device):
            model, inputs = MODELS[name]()
    else:
        rank = int(os.environ.get("RANK", 0))
        model = Model(how, device).to(device)
        inputs = {"tokens": torch.randint(0, 1009, (8, 512), device=device).roll(rank, 1)}
    return model.to(torch.bfloat16), inputs


def parallel(model: nn.Module, how: Sequence[str]) -> nn.Module:
    """The model as a part of those of all processes."""
    if not {"ddp", "fsdp"} & {*how}:
        return model
    torch.distributed.init_process_group("gloo")
    if "ddp" in how:
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    assert isinstance(model, Model)
    fully_shard(model.mlp, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--default", action="store_true")
    parser.add_argument("--distort", default="")
    parser.add_argument("--model", default="")
    parser.add_argument("--how", nargs="*", default=[], choices=HOW)
    options = parser.parse_args()
    how = options.how
    torch.use_deterministic_algorithms(not options.default)
    config.test_configs.distort_benchmarking_result = options.distort
    torch._dynamo.config.capture_scalar_outputs = "scalars" in how
    model, inputs = made(options.model, how, options.device)
    model = parallel(model, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step: Any = torch.compile(
        model, dynamic=True if "dynamic" in how else None, mode="reduce-overhead" if "graphs" in how else None
    )
    found = {}
    for number in range(3):
        result = step(**inputs)
        loss = result if isinstance(result, Tensor) else result.loss
        if "thread" in how:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(loss.backward).result()
        else:
            loss.backward()
        found[f"step {number}: loss"] = digest(loss)
        given = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        found |= {f"step {number}: gradient of {name}": digest(gradient) for name, gradient in given}
        optimizer.step()
        optimizer.zero_grad()
    found |= {name: digest(parameter) for name, parameter in model.named_parameters()}
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
