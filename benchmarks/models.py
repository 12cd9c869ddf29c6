"""Models of the training benchmark: each takes (layers, length), makes its inputs, and returns its loss when called."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Llama(nn.Module):
    """LlamaForCausalLM of transformers, hidden 2048, 16 heads and 4 kv heads of 128, with next-token loss."""

    def __init__(self, layers: int, length: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            hidden_size=2048, intermediate_size=5632, num_attention_heads=16, num_key_value_heads=4,
            num_hidden_layers=layers, vocab_size=32000, max_position_embeddings=length,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def inputs(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, 32000, (batch, length), device=generator.device, generator=generator)

    def forward(self, tokens: Tensor) -> Any:
        return self.model(input_ids=tokens, labels=tokens).loss


class _EncoderLayer(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Layers in the shape of ViT-L (hidden 1024, 16 heads of 64) on random patches, no mask; loss: mean of squares."""

    HIDDEN, HEADS = 1024, 16

    def __init__(self, layers: int, length: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_EncoderLayer(self.HIDDEN, self.HEADS) for _ in range(layers)))

    def inputs(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        shape = (batch, length, self.HIDDEN)
        return torch.randn(shape, device=generator.device, generator=generator).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).float().square().mean()


MODELS = {"llama": Llama, "encoder": Encoder}
