"""A small model with attention, whose activations and gradients are easy to name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BATCH, HEADS, BLOCKS = 2, 2, 2

Program = Callable[[nn.Module], Callable[..., Any]]
"""How a model becomes what is trained."""


class Block(nn.Module):
    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim, width = head_dim, HEADS * head_dim
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, self.head_dim).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return result


class Model(nn.Module):
    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(head_dim) for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def plain(model: nn.Module) -> nn.Module:
    return model


def inputs(step: int, length: int = 16, width: int = HEADS * 16) -> Tensor:
    """The inputs of a step."""
    return torch.arange(BATCH * length * width).view(BATCH, length, width).mul(step).sin()


def train(
    program: Program,
    steps: int = 2,
    micro_batches: int = 1,
    length: int = 16,
    head_dim: int = 16,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Train from scratch; steps are counted from 1."""
    torch.manual_seed(0)
    model = Model(head_dim).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of = program(model)
    for step in range(1, steps + 1):
        batch = inputs(step, length, HEADS * head_dim).to(device, dtype)
        for _ in range(micro_batches):
            loss_of(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
