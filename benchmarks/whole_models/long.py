"""Models with long sequences, in the ways in which data loaders hand them over: where attention is much of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .made import Made, causal, numbers, pictures

VOCABULARY = 32000
PADDED = (6000, 7800)
"""Valid tokens of sequences of 8192."""
DOCUMENTS = (819, 1310, 1638, 1966, 2129, 2457, 2785, 3280)
"""Lengths of packed documents, 16384 tokens together."""
SHORT = (375, 488) * 32
"""Valid tokens of sequences of 512."""


@dataclass(frozen=True)
class Attention:
    """What the attention of a model computes in a step.

    Attributes:
        pairs: visible (query, key) pairs of one head, of all batch elements; half of all under a causal mask.
    """

    layers: int
    heads: int
    head_dim: int
    pairs: float

    @property
    def forward_flops(self) -> float:
        """Two products of all layers."""
        return 4.0 * self.layers * self.heads * self.head_dim * self.pairs

    @property
    def backward_flops(self) -> float:
        """Five products."""
        return 2.5 * self.forward_flops


def _llama(layers: int, batch: int, length: int, **more: Any) -> Made:
    """Hidden size 2048, 16 query heads on 4 kv heads of 128."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_attention_heads=16, num_key_value_heads=4,
        num_hidden_layers=layers, vocab_size=VOCABULARY, max_position_embeddings=length,
    )  # fmt: skip
    model, inputs = causal(config, batch, length)
    return model, {**inputs, **more}


def llama_8k() -> Made:
    return _llama(4, 2, 8192)


def llama_32k() -> Made:
    return _llama(4, 1, 32768)


def llama_ones() -> Made:
    """A mask that hides nothing, as tokenizers return one."""
    return _llama(4, 2, 8192, attention_mask=torch.ones(2, 8192, dtype=torch.long))


def llama_padded() -> Made:
    mask = torch.arange(8192) < torch.tensor(PADDED)[:, None]
    model, inputs = _llama(4, 2, 8192, attention_mask=mask.long())
    return model, {**inputs, "labels": inputs["labels"].masked_fill(~mask, -100)}


def llama_packed() -> Made:
    """Documents that only `position_ids` tell apart; with a cache transformers sees none."""
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    return _llama(4, 1, 16384, position_ids=positions, use_cache=False)


def bert_padded() -> Made:
    """The width of BERT-large, with its dropout of 0.1."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_hidden_layers=6, vocab_size=VOCABULARY
    )
    tokens = numbers(VOCABULARY, 64, 512)
    mask = torch.arange(512) < torch.tensor(SHORT)[:, None]
    labels = tokens.masked_fill(~mask, -100)
    return BertForMaskedLM(config), {"input_ids": tokens, "labels": labels, "attention_mask": mask.long()}


def gpt2_dropout() -> Made:
    """The width of GPT-2 medium, with its dropout of 0.1."""
    from transformers import GPT2Config

    config = GPT2Config(n_embd=1024, n_head=16, n_layer=4, vocab_size=VOCABULARY, n_positions=4096, use_cache=False)
    return causal(config, 8, 4096)


class _Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Layers(nn.Module):
    """Layers of 16 heads that call SDPA without a mask tensor, as nanoGPT and vision transformers do."""

    def __init__(self, layers: int, hidden: int, *, is_causal: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_Layer(hidden, 16, is_causal=is_causal) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).float().square().mean()
        return loss


def encoder() -> Made:
    """Layers in the shape of ViT-L."""
    return Layers(6, 1024, is_causal=False), {"x": pictures(8, 4096, 1024)}


def decoder() -> Made:
    """`is_causal=True` and no mask tensor: what the default runs fastest."""
    return Layers(6, 2048, is_causal=True), {"x": pictures(2, 8192, 2048)}


def _causal_pairs(*lengths: int) -> float:
    return sum(n * n / 2 for n in lengths)


LONG: dict[Callable[[], Made], Attention] = {
    llama_8k: Attention(4, 16, 128, _causal_pairs(8192, 8192)),
    llama_32k: Attention(4, 16, 128, _causal_pairs(32768)),
    llama_ones: Attention(4, 16, 128, _causal_pairs(8192, 8192)),
    llama_padded: Attention(4, 16, 128, _causal_pairs(*PADDED)),
    llama_packed: Attention(4, 16, 128, _causal_pairs(*DOCUMENTS)),
    bert_padded: Attention(6, 16, 64, float(sum(n * n for n in SHORT))),
    gpt2_dropout: Attention(4, 16, 64, _causal_pairs(*[4096] * 8)),
    encoder: Attention(6, 16, 64, 8.0 * 4096**2),
    decoder: Attention(6, 16, 128, _causal_pairs(8192, 8192)),
}
"""The models, and what their attention computes."""
