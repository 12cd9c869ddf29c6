"""Tiny causal language models of `transformers`, randomly initialised from a configuration: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

WINDOW = 8
"""Sliding window of the Mistral model, in tokens: shorter than the sequences of the tests."""

BANDS = {"Llama": "causal", "Qwen3": "causal", "Mistral": f"band(0,{WINDOW - 1})"}
"""Families, with the mask of their attention layers as `str(Band)` writes it."""

VOCABULARY = 61


def causal_lm(family: str, *, layers: int = 2, head_dim: int = 16, **settings: Any) -> torch.nn.Module:
    """A model of 4 query and 2 key/value heads per layer, in training mode, with `sdpa` attention and no cache."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=4 * head_dim,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=4096,
        attn_implementation="sdpa",
        use_cache=False,
        **({"sliding_window": WINDOW} if family == "Mistral" else {}),
        **settings,
    )
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return model.train()


def token_ids(batch: int, length: int) -> torch.Tensor:
    """Reproducible input, int64, [batch, length]."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))
