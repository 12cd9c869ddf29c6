"""A whole training step: forward, backward and optimiser of a small decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..records.records import sites
from ..upstream.fresh import every_graph_compiled
from .results import REPEATS, Row
from .timing import take_turns
from .variants import VARIANTS, Variant, same_bits


@dataclass(frozen=True)
class Size:
    """A decoder and its batch."""

    layers: int
    hidden: int
    heads: int
    length: int
    batch: int
    vocabulary: int = 32000

    def __str__(self) -> str:
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        return f"{layers}, {self.batch}x{self.heads}x{self.length}x{self.hidden // self.heads}"


ON_GPU = Size(layers=4, hidden=2048, heads=16, length=4096, batch=2)
ON_CPU = Size(layers=1, hidden=128, heads=2, length=128, batch=1, vocabulary=256)


class _Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.RMSNorm(size.hidden) for _ in range(2))
        self.qkv, self.out = (nn.Linear(size.hidden, n * size.hidden, bias=False) for n in (3, 1))
        self.up = nn.Linear(size.hidden, 4 * size.hidden, bias=False)
        self.down = nn.Linear(4 * size.hidden, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.silu(self.up(self.norms[1](x))))
        return result


class Decoder(nn.Module):
    """Layers of causal attention and an MLP on embedded tokens [batch, length]; returns the next-token loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.Sequential(*(_Layer(size) for _ in range(size.layers)))
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.layers(self.embedding(tokens)))
        loss: Tensor = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        return loss


@dataclass
class Training:
    """One model in training, with one batch."""

    loss: Callable[[], Tensor]
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer

    @classmethod
    def start(cls, size: Size, variant: Variant, device: str) -> Training:
        """A model from a fixed start; it compiles at its first call."""
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device == "cuda" else []):
            torch.manual_seed(0)
            with torch.device(device):
                model = Decoder(size).to(torch.bfloat16 if device == "cuda" else torch.float32)
                tokens = torch.randint(size.vocabulary, (size.batch, size.length))
        compiled = variant.compile(model)
        parameters = list(model.parameters())
        return cls(lambda: compiled(tokens), parameters, torch.optim.AdamW(parameters, lr=1e-4, fused=True))

    def gradients(self) -> tuple[Tensor, ...]:
        """The gradients of all parameters; the parameters stay."""
        return torch.autograd.grad(self.loss(), self.parameters)

    def step(self) -> None:
        """Forward, backward and optimiser."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(size: Size, device: str, begin: Callable[[str], Any], *, repeats: int = 10) -> Row:
    """Time a training step in every variant, and compare the gradients of its first step bit by bit.

    Args:
        device: "cuda" or "cpu".
        begin: called with what is done next, `PARTS` times.
        repeats: timed steps of each variant.
    """
    row = Row(str(size))
    calls: dict[str, Callable[[], None]] = {}
    for variant in VARIANTS:
        begin(f"training step: {variant.name} compiles")
        before = len(sites())
        try:
            with every_graph_compiled(), variant.active():
                training = Training.start(size, variant, device)
                row.equal[variant.name] = same_bits(training.gradients, REPEATS)
        except RuntimeError as error:  # not supported, not compiled, or out of memory
            row.not_run[variant.name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            continue
        if variant.ours:
            row.note(sites()[before:])
        calls[variant.name] = variant.during(training.step)
    begin("training step: taking turns")
    row.times = take_turns(calls, device, repeats=repeats, warmup=min(3, repeats))
    torch.compiler.reset()
    return row
