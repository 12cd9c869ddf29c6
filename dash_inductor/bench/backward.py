"""The attention backward alone: from saved tensors to the gradients of query, key and value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..records.records import sites
from ..upstream.fresh import every_graph_compiled
from .results import REPEATS, Row
from .timing import take_turns
from .variants import VARIANTS, Variant, same_bits


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


QUICK = (Shape(2, 16, 16, 4096, 128, True), Shape(2, 32, 8, 4096, 128, True), Shape(4, 16, 16, 2048, 64, False))
_REGULAR = tuple(
    Shape(16384 // length, 2048 // head_dim, 2048 // head_dim, length, head_dim, causal)
    for head_dim in (128, 64)
    for causal in (False, True)
    for length in (1024, 2048, 4096, 8192, 16384)
)
ALL = (*_REGULAR, Shape(2, 64, 8, 8192, 128, True))
ON_CPU = (Shape(1, 4, 4, 256, 64, True), Shape(1, 4, 4, 256, 64, False))


def prepare(shape: Shape, variant: Variant, device: str) -> Callable[[], tuple[Tensor, ...]]:
    """The compiled backward as a call without arguments, to be made inside `variant.active`; compiles it."""
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


def measure(shape: Shape, device: str, begin: Callable[[str], Any], *, repeats: int = 20) -> Row:
    """Time the backward of one shape in every variant.

    Args:
        device: "cuda" or "cpu".
        begin: called with what is done next, `PARTS` times.
        repeats: timed calls of each variant.
    """
    row = Row(str(shape))
    calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    for variant in VARIANTS:
        begin(f"{shape}: {variant.name} compiles")
        before = len(sites())
        try:
            with every_graph_compiled(), variant.active():
                call = variant.during(prepare(shape, variant, device))
                same = same_bits(call, REPEATS)
        except RuntimeError as error:  # not supported, not compiled, or out of memory
            row.not_run[variant.name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            continue
        if variant.ours:
            row.note(sites()[before:])
        row.equal[variant.name], calls[variant.name] = same, call
    begin(f"{shape}: taking turns")
    row.times = take_turns(calls, device, repeats=repeats, warmup=min(3, repeats))
    torch.compiler.reset()
    return row
