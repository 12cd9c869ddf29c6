"""Tiny models of `transformers`, randomly initialised from a configuration: nothing is downloaded."""

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


def encoder(family: str, *, layers: int = 2) -> torch.nn.Module:
    """A model of 4 heads per layer that predicts masked tokens, without dropout, in training mode."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, f"{family}ForMaskedLM")(config)
    return model.train()


def padding(kind: str, batch: int, length: int) -> torch.Tensor:
    """Which tokens are valid, bool [batch, length]: "ones", or padded on the "left" or "right", or with "holes"."""
    place = torch.arange(length)
    count = torch.arange(batch)[:, None] * (length // batch)
    if kind == "holes":
        return torch.rand(batch, length, generator=torch.Generator().manual_seed(0)) < 0.7
    return {"ones": place >= 0 * count, "left": place >= count, "right": place < length - count}[kind]


def speech_model() -> torch.nn.Module:
    """Whisper, with one encoder and one decoder layer."""
    import transformers

    heads = {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    layers = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    widths = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.WhisperConfig(
        **heads,
        **layers,
        **widths,
        **tokens,
        decoder_start_token_id=1,
        max_source_positions=32,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return transformers.WhisperForConditionalGeneration(config).train()


def vision_language_model(family: str) -> torch.nn.Module:
    """Idefics3 or SmolVLM, for images of 32 x 32 pixels in patches of 4 x 4, with one layer in each part."""
    import transformers

    part = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{family}Config")(
        text_config={"model_type": "llama", "vocab_size": 200, "num_key_value_heads": 1, "head_dim": 16, **part},
        vision_config={"image_size": 32, "patch_size": 4, **part},
        scale_factor=2,
        image_token_id=100,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    model: torch.nn.Module = getattr(transformers, f"{family}Model")(config)
    return model.train()


def token_ids(batch: int, length: int) -> torch.Tensor:
    """Reproducible input, int64, [batch, length]."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))


def t5(*, layers: int = 1, head_dim: int = 16) -> torch.nn.Module:
    """A T5 of 4 heads per layer without dropout, in training mode: its bias of relative positions is learned."""
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=head_dim,
        d_ff=32,
        num_layers=layers,
        num_heads=4,
        dropout_rate=0.0,
        attn_implementation="sdpa",
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.T5ForConditionalGeneration(config)
    return model.train()
