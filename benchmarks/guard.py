"""The cost of the guard's checks of bits in a training step, of which they change no bit.

    python -m benchmarks.guard [--hidden 4096 --layers 4 --batch 4 --length 4096] [--steps 6 --rounds 3]
                               [--device cuda] [--name guard]

A language model of a billion parameters in bf16, whose optimizer keeps two tensors of state for each, trains by turns
with the default checks and without them, in eager PyTorch on one GPU.  Rows: the median time of a step of each, what
the checks add in milliseconds and as a share, and the bytes that a step sends to the monitor.  Half a minute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dash_guard.checks import all as all_checks
from dash_guard.process.rank import Rank
from dash_guard.transport.channel import Local

from . import common

VOCABULARY = 32000


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // 128
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class LanguageModel(nn.Module):
    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures one row of the table."""
    torch.manual_seed(0)
    with torch.device(options.device):
        torch.set_default_dtype(torch.bfloat16)
        model = LanguageModel(options.hidden, options.layers)
        torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=options.device == "cuda")
    tokens = torch.randint(VOCABULARY, (options.batch, options.length), device=options.device)
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None

    def train(steps: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        wait()
        return (time.perf_counter() - start) / steps * 1e3

    off, on, sent, compared = [], [], 0, 0
    train(2)
    for _ in range(options.rounds):
        off.append(train(options.steps))
        local = Local()
        rank = Rank(0, 1, local.end(0))
        rank.checks = [kind(rank) for kind in all_checks.BITS]
        rank.start()
        train(3)  # kernels are loaded, and memory is pinned
        local.receive()
        on.append(train(options.steps))
        sent = max(len(message.encode()) for message in local.receive())
        rank.close()
        compared = rank.coverage.to_dict()["at_rest"]["counts"]["tensors"]
        if len(rank.checks) < 3:
            raise RuntimeError(f"a check was switched off: {rank.coverage.to_dict()}")
    before, after = statistics.median(off), statistics.median(on)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step ms": before,
        "guarded ms": after,
        "added ms": after - before,
        "added %": (after / before - 1) * 100,
        "of 184 ms %": (after - before) / 1.84,
        "bytes of a message": sent,
        "tensors compared": compared,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 4096), ("layers", 4), ("batch", 4), ("length", 4096), ("steps", 6), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--name", default="guard", help="name of the results file")
    options = parser.parse_args()
    common.watchdog(300)
    row = measure(options)
    common.table([row])
    print(common.write(options.name, {"conditions": common.conditions(), "options": vars(options), "rows": [row]}))


if __name__ == "__main__":
    main()
