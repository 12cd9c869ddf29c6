"""A training step as torchtitan makes it of Llama 3 with a billion parameters, on packed documents by FlexAttention.

The architecture and the masks are those of torchtitan 0.3.0, written plainly, because that package needs a newer torch
than 2.11: `llama3` "1B" (width 2048, 32 heads of 64, 8 kv heads, tied embeddings of 128256 tokens), blocks, loss and
block mask compiled each on its own, no recomputation of activations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dash_inductor.records.records import clear_sites

from . import common
from .documents import packed
from .entry_steps import DEVICE, fates_of
from .variants import DASH, DEFAULT, Variant


@dataclass(frozen=True)
class Size:
    layers: int = 16
    width: int = 2048
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 8192
    vocabulary: int = 128256
    length: int = 8192
    documents: int = 8

    @property
    def dim(self) -> int:
        return self.width // self.heads


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.dim = size.dim
        self.norm1, self.norm2 = (nn.RMSNorm(size.width, eps=1e-5) for _ in range(2))
        self.q = nn.Linear(size.width, size.heads * size.dim, bias=False)
        self.k, self.v = (nn.Linear(size.width, size.kv_heads * size.dim, bias=False) for _ in range(2))
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.dim)) for layer in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (_turned(q, cos, sin), _turned(k, cos, sin), v))
        attended: Any = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


class Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-5)
        nn.init.normal_(self.embedding.weight, std=size.width**-0.5)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return F.linear(self.norm(x), self.embedding.weight)


def mask_of(starts: Tensor, length: int, create: Callable[..., BlockMask]) -> BlockMask:
    """Returns the mask "causal within documents", as torchtitan writes it for one row of tokens.

    Args:
        starts: whether a token is the first of its document, bool [length].
        create: `create_block_mask`, compiled.
    """
    document = torch.cumsum(starts.int(), 0).to(torch.int32) - 1
    places = torch.arange(length, device=starts.device, dtype=torch.int32)
    offsets = torch.full((-(-(length + 1) // 128) * 128,), length, device=starts.device, dtype=torch.int32)
    offsets.scatter_(
        0,
        torch.where(starts, document, torch.full_like(document, length)).to(torch.int64),
        torch.where(starts, places, torch.full_like(places, length)),
    )

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (k >= offsets[document[q]])

    return create(seen, 1, None, length, length, device=starts.device)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Training:
    """Trains one model on one row of tokens, with its blocks and its loss compiled."""

    def __init__(self, size: Size, variant: Variant) -> None:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.model = Model(size).to(torch.bfloat16)
            self.tokens = torch.randint(size.vocabulary, (1, size.length))
            angles = torch.arange(size.length)[:, None] / 500000 ** (torch.arange(0, size.dim, 2) / size.dim)
            self.cos, self.sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
            self.starts = torch.zeros(size.length, dtype=torch.bool)
            self.starts[torch.tensor([0, *packed(size.documents, size.length)[:-1]])] = True
        backend = "dash" if variant.ours else "inductor"
        for block in self.model.blocks:
            block.compile(backend=backend, fullgraph=True, dynamic=False)
        self.loss, self.create = variant.compile(loss_of), variant.compile(create_block_mask)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
        self.length, self.variant = size.length, variant

    def step(self) -> float:
        with self.variant.active():
            mask = mask_of(self.starts, self.length, self.create)
            logits = self.model(self.tokens, self.cos, self.sin, mask)
            loss = self.loss(logits, self.tokens.roll(-1, 1))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach())


def timed(training: Training) -> tuple[float, float]:
    """Returns (milliseconds of a step, loss)."""
    start = time.perf_counter()
    loss = training.step()  # it waits for the loss
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, loss


def titan(size: Size | None = None, steps: int = 10, variants: tuple[Variant, ...] = (DASH, DEFAULT)) -> Any:
    """Returns a row per variant: the median step time, measured in alternation, and the outcome of each attention."""
    size = size or Size()
    common.watchdog(300)
    rows: dict[str, dict[str, Any]] = {}
    trainings = {}
    torch._dynamo.reset()
    for variant in variants:
        clear_sites()
        trainings[variant.name] = training = Training(size, variant)
        for _ in range(3):
            training.step()
        fates = fates_of()
        rows[variant.name] = {"step": f"llama3 1B x{size.layers} t{size.length}", "variant": variant.name}
        rows[variant.name] |= {"ms": math.nan, "ours/it": math.nan, "loss": math.nan, "fate": fates}
    times: dict[str, list[float]] = {name: [] for name in trainings}
    for _ in range(steps):
        for name, training in trainings.items():
            ms, rows[name]["loss"] = timed(training)
            times[name].append(ms)
    for name, spent in times.items():
        rows[name]["ms"] = sorted(spent)[len(spent) // 2]
    for row in rows.values():
        row["ours/it"] = rows[DASH.name]["ms"] / row["ms"]
    found = list(rows.values())
    common.table([{key: value for key, value in row.items() if key != "fate"} for row in found])
    print(f"  {DASH.name}: {rows[DASH.name]['fate']}", flush=True)
    return found
