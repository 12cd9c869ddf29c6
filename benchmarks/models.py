"""Models of the training benchmark: each takes (layers, length), makes its inputs by name, and returns its loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUTS = ("plain", "ones", "padded", "packed")
"""Inputs from a data loader: tokens alone, with an attention mask of ones, padded on the right, or packed documents."""

ROWS = (6000 / 8192, 7800 / 8192)
"""Lengths of padded sequences, by turns, as parts of the longest."""

DOCUMENTS = (5, 8, 10, 12, 13, 15, 17, 20)
"""Lengths of packed documents, in parts of their sum."""


class _Transformers(nn.Module):
    """A model of transformers that reads tokens and returns its loss."""

    VOCABULARY = 32000
    model: nn.Module

    def inputs(self, batch: int, length: int, generator: torch.Generator, kind: str) -> dict[str, Any]:
        """As a collator of transformers sends them; `kind` is one of `INPUTS`."""
        device = generator.device
        tokens = torch.randint(0, self.VOCABULARY, (batch, length), device=device, generator=generator)
        inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
        if kind == "ones":
            inputs["attention_mask"] = torch.ones_like(tokens)
        elif kind == "padded":
            ends = torch.tensor([round(ROWS[b % len(ROWS)] * length) for b in range(batch)], device=device)
            valid = torch.arange(length, device=device) < ends[:, None]
            inputs |= {"attention_mask": valid.long(), "labels": tokens.masked_fill(~valid, -100)}
        elif kind == "packed":
            lengths = [length * part // sum(DOCUMENTS) for part in DOCUMENTS[:-1]]
            lengths.append(length - sum(lengths))
            positions = torch.cat([torch.arange(n, device=device) for n in lengths]).expand(batch, -1)
            inputs |= {"position_ids": positions, "use_cache": False}  # with a cache transformers sees no documents
        return inputs

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs).loss


class Llama(_Transformers):
    """LlamaForCausalLM, hidden 2048, 16 heads and 4 kv heads of 128, with next-token loss."""

    def __init__(self, layers: int, length: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            hidden_size=2048, intermediate_size=5632, num_attention_heads=16, num_key_value_heads=4,
            num_hidden_layers=layers, vocab_size=self.VOCABULARY, max_position_embeddings=length,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)


class Bert(_Transformers):
    """BertForMaskedLM in the width of BERT-large, 16 heads of 64, with its default dropout of 0.1."""

    def __init__(self, layers: int, length: int) -> None:
        from transformers import BertConfig, BertForMaskedLM

        super().__init__()
        config = BertConfig(
            hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_hidden_layers=layers,
            vocab_size=self.VOCABULARY, max_position_embeddings=length,
        )  # fmt: skip
        self.model = BertForMaskedLM(config)

    def inputs(self, batch: int, length: int, generator: torch.Generator, kind: str) -> dict[str, Any]:
        if kind == "packed":
            raise SystemExit("the encoder of BERT does not read documents off position_ids")
        return super().inputs(batch, length, generator, kind)


class GPT2(_Transformers):
    """GPT2LMHeadModel in the width of GPT-2 medium, 16 heads of 64, with its default dropout of 0.1."""

    def __init__(self, layers: int, length: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            n_embd=1024, n_head=16, n_layer=layers, vocab_size=self.VOCABULARY, n_positions=length, use_cache=False
        )
        self.model = GPT2LMHeadModel(config)


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

    def inputs(self, batch: int, length: int, generator: torch.Generator, kind: str) -> dict[str, Tensor]:
        if kind != "plain":
            raise SystemExit(f"the encoder has no inputs of the kind {kind!r}, only plain ones")
        shape = (batch, length, self.HIDDEN)
        return {"x": torch.randn(shape, device=generator.device, generator=generator).to(torch.bfloat16)}

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).float().square().mean()


MODELS = {"llama": Llama, "bert": Bert, "gpt2": GPT2, "encoder": Encoder}
