"""The attention backward on this machine: PyTorch's default, deterministic PyTorch, and dash_inductor.

    python -m benchmarks.site [--name site]

One call from saved tensors to the gradients of query, key and value.  The variants take turns.  The exit status is 1 if
dash_inductor left an attention to PyTorch, or its bits were not always the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.config import config
from dash_inductor.records.records import clear_sites, sites
from dash_inductor.upstream.fresh import every_graph_compiled

from . import common
from .timing import take_turns
from .variants import DASH, VARIANTS, Variant, same_bits


@dataclass(frozen=True)
class Shape:
    """One attention with equal lengths of queries and keys; its dtype is bfloat16 on GPUs and float32 on the CPU."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}({self.kv_heads})"
        return f"{self.batch}x{heads}x{self.length}x{self.head_dim} {'causal' if self.causal else 'full'}"

    def tensors(self, device: str) -> tuple[Tensor, ...]:
        """Query, key, value and the output's gradient, [batch, heads, length, head dim], heads interleaved."""
        generator = torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        sizes = ((self.batch, self.length, n, self.head_dim) for n in heads)
        drawn = (torch.randn(size, device=device, generator=generator).to(dtype) for size in sizes)
        return tuple(tensor.transpose(1, 2) for tensor in drawn)


ON_GPU = (Shape(2, 16, 16, 4096, 128, True), Shape(2, 32, 8, 4096, 128, True), Shape(4, 16, 16, 2048, 64, False))
ON_CPU = (Shape(1, 4, 4, 256, 64, True), Shape(1, 4, 4, 256, 64, False))
REPEATS = 5
"""Further calls whose bits are compared with the first one's."""


def prepare(shape: Shape, variant: Variant, device: str) -> Callable[[], tuple[Tensor, ...]]:
    """Compiles the backward and returns it as a call without arguments, to be made inside `variant.active`."""
    *leaves, gradient = (tensor.detach() for tensor in shape.tensors(device))
    for leaf in leaves:
        leaf.requires_grad_()
    grouped = shape.heads != shape.kv_heads

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=shape.causal, enable_gqa=grouped)

    out = variant.compile(attention)(*leaves)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    backward()
    return backward


def measure(shape: Shape, device: str, *, repeats: int = 20) -> list[dict[str, Any]]:
    """A row for every variant: its median in ms, half the distance of its quartiles, how many times as long as
    dash_inductor it takes, whether its bits stay the same, and why it did not run or was left to PyTorch.
    """
    calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    same, said = {}, {}
    for variant in VARIANTS:
        print(f"{shape}: {variant.name} compiles", file=sys.stderr, flush=True)
        clear_sites()
        try:
            with every_graph_compiled(), variant.active():
                call = variant.during(prepare(shape, variant, device))
                same[variant.name], calls[variant.name] = same_bits(call, REPEATS), call
        except RuntimeError as error:  # not supported, not compiled, or out of memory
            said[variant.name] = f"not run: {common.reason(error)}"
            continue
        if variant.ours:
            fallback = [str(record) for record in sites() if record.status == "fallback"]
            said[variant.name] = "; ".join(fallback) if sites() else "no attention seen: dash-inductor doctor says why"
    times = take_turns(calls, device, repeats=repeats, warmup=min(3, repeats))
    torch.compiler.reset()
    ours = times.get(DASH.name)
    return [
        {
            "site": str(shape),
            "variant": variant.name,
            "ms": time and time.median,
            "quartiles": time and (time.high - time.low) / 2,
            "x dash": time and ours and time.median / ours.median,
            "same bits": same.get(variant.name),
            "said": said.get(variant.name, ""),
        }
        for variant in VARIANTS
        for time in [times.get(variant.name)]
    ]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="of a results file; without it none is written")
    options = parser.parse_args(words)
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        print("No GPU: the reference executor runs, which exists for tests. Its times say nothing about a GPU.")
    device, shapes, repeats = ("cuda", ON_GPU, 20) if on_gpu else ("cpu", ON_CPU, 3)
    with config.patch(cpu=config.cpu if on_gpu else "reference"):
        rows = [row for shape in shapes for row in measure(shape, device, repeats=repeats)]
    common.table(rows)
    if options.name:
        print(common.write(options.name, {"conditions": common.conditions(), "rows": rows}))
    return int(any(row["variant"] == DASH.name and not (row["same bits"] and not row["said"]) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
