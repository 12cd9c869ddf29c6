"""Tiny models of `transformers`, randomly initialised from a configuration: nothing is downloaded.

`FAMILIES` is the only description of a family: `build` makes its model, and `inputs_of` what a data loader sends to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WINDOW = 8
"""Sliding window of the models that have one, in tokens: shorter than the sequences of the tests."""

CHUNK = 16
"""Length of the chunks of Llama 4, in tokens."""

BANDS = {"Llama": "causal", "Qwen3": "causal", "Mistral": f"band(0,{WINDOW - 1})"}
"""Families, with the mask of their attention layers as `str(Band)` writes it."""

VOCABULARY = 61

HEADS, KV_HEADS = 4, 2


@dataclass(frozen=True)
class Size:
    """Layers of each part of a model, and the head dimension of its attention."""

    layers: int
    head_dim: int

    @property
    def hidden(self) -> int:
        return HEADS * self.head_dim


Settings = dict[str, Any]


def _decoder(size: Size) -> Settings:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "intermediate_size": 32,
        "num_hidden_layers": size.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": size.head_dim,
        "max_position_embeddings": 4096,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _two_kinds(size: Size) -> Settings:
    """A layer with a sliding window and one without, by turns."""
    kinds = ("sliding_attention", "full_attention")
    return _decoder(size) | {
        "sliding_window": WINDOW,
        "layer_types": [kinds[layer % 2] for layer in range(size.layers)],
    }


def _experts(size: Size) -> Settings:
    """All experts see every token: rounding cannot send one elsewhere."""
    return _decoder(size) | {"num_local_experts": 2, "num_experts_per_tok": 2}


def _one_width(size: Size) -> Settings:
    """For configurations that know no head dimension and no grouped heads."""
    settings = _decoder(size)
    del settings["head_dim"], settings["num_key_value_heads"]
    return settings


def _gpt2(size: Size) -> Settings:
    return {
        "vocab_size": VOCABULARY, "n_embd": size.hidden, "n_layer": size.layers, "n_head": HEADS, "n_positions": 1024,
        "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _latent(size: Size) -> Settings:
    """Multi-head latent attention: query and key have 1.5 times the head dimension of value."""
    settings = _decoder(size) | {"num_key_value_heads": HEADS}
    del settings["head_dim"]
    experts = {
        "n_routed_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "moe_intermediate_size": 16}
    dims = {"qk_nope_head_dim": size.head_dim, "qk_rope_head_dim": size.head_dim // 2, "v_head_dim": size.head_dim}
    return settings | experts | ranks | dims


def _latent_windows(size: Size) -> Settings:
    """Windows with sinks, and query and key with 1.5 times the head dimension of value; all experts see every token."""
    return _two_kinds(size) | {
        "head_dim": size.head_dim * 3 // 2,
        "v_head_dim": size.head_dim,
        "mlp_layer_types": ["dense"] * size.layers,
    }


def _alibi(size: Size) -> Settings:
    return _one_width(size) | {"n_layer": size.layers, "n_head": HEADS}


def _mpt(size: Size) -> Settings:
    return {
        "vocab_size": VOCABULARY, "d_model": size.hidden, "n_layers": size.layers, "n_heads": HEADS,
        "expansion_ratio": 1, "max_seq_len": 256, "use_cache": False,
    }  # fmt: skip


def _chunked(size: Size) -> Settings:
    kinds = ("chunked_attention", "full_attention")
    return _experts(size) | {
        "intermediate_size_mlp": 32,
        "attention_chunk_size": CHUNK,
        "layer_types": [kinds[layer % 2] for layer in range(size.layers)],
    }


def _encoder(size: Size) -> Settings:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "intermediate_size": 32,
        "num_hidden_layers": size.layers,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
    }


def _modern_encoder(size: Size) -> Settings:
    kinds = ("full_attention", "sliding_attention")
    return _encoder(size) | {
        "layer_types": [kinds[layer % 2] for layer in range(size.layers)],
        "local_attention": 2 * WINDOW,
        "bos_token_id": 1,
        "cls_token_id": 1,
        "eos_token_id": 2,
        "sep_token_id": 2,
    }


def _rotary_encoder(size: Size) -> Settings:
    return _encoder(size) | {"position_embedding_type": "rotary", "mask_token_id": 3, "eos_token_id": 2}


def _relative_positions(size: Size) -> Settings:
    return {
        "vocab_size": VOCABULARY, "d_model": size.hidden, "d_kv": size.head_dim, "d_ff": 32, "num_heads": HEADS,
        "num_layers": size.layers, "num_decoder_layers": size.layers, "use_cache": False, "pad_token_id": 0,
        "decoder_start_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip


def _two_parts(size: Size) -> Settings:
    """Encoder and decoder in the words of BART and Whisper."""
    parts = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in
             {"attention_heads": HEADS, "layers": size.layers, "ffn_dim": 32}.items()}  # fmt: skip
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return {"vocab_size": VOCABULARY, "d_model": size.hidden, "use_cache": False} | parts | tokens


def _speech(size: Size) -> Settings:
    return _two_parts(size) | {"num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 1024}


def _vision(size: Size) -> Settings:
    settings = {
        "hidden_size": size.hidden, "intermediate_size": 32, "num_hidden_layers": size.layers,
        "num_attention_heads": HEADS, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    return settings


def _vision_and_text(size: Size) -> Settings:
    text = {name: value for name, value in _encoder(size).items() if name != "pad_token_id"}
    return {"text_config": text | {"projection_size": size.hidden}, "vision_config": _vision(size)}


LANGUAGE = ("plain", "ones", "right", "left", "packed")
"""Kinds of inputs: tokens alone, with an `attention_mask` of ones or of a batch padded on a side, packed documents."""
ONE_MASK = LANGUAGE[:4]
IMAGES = ("plain",)


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        classes: prefix of the configuration's class, and name of the model's.
        settings: the configuration of a tiny model.
        reads: what the model reads: "text", "text to text", "speech", "images" or "images and text".
        kinds: the kinds of inputs that it can be given.
        dropout: whether it has dropout at its default settings.
        cuda_head_dim: of its attention on CUDA, such that there are kernels for it.
        more: settings that no other family has.
    """

    classes: tuple[str, str]
    settings: Callable[[Size], Settings]
    reads: str = "text"
    kinds: tuple[str, ...] = LANGUAGE
    dropout: bool = False
    cuda_head_dim: int = 64
    more: Mapping[str, Any] = field(default_factory=dict)


def _causal(name: str, settings: Callable[[Size], Settings] = _decoder, **more: Any) -> Family:
    return Family((name, f"{name}ForCausalLM"), settings, more=more)


def _masked(name: str, settings: Callable[[Size], Settings] = _encoder, *, dropout: bool = False) -> Family:
    return Family((name, f"{name}ForMaskedLM"), settings, kinds=ONE_MASK, dropout=dropout)


FAMILIES: dict[str, Family] = {
    "Llama": _causal("Llama"),
    "Qwen2": _causal("Qwen2"),
    "Qwen3": _causal("Qwen3"),
    "Mistral": _causal("Mistral", sliding_window=WINDOW),
    "Mixtral": _causal("Mixtral", _experts),
    "Gemma2": _causal("Gemma2", _two_kinds),
    "Gemma3": Family(("Gemma3Text", "Gemma3ForCausalLM"), _two_kinds),
    "Phi3": _causal("Phi3"),
    "GPT2": Family(("GPT2", "GPT2LMHeadModel"), _gpt2, dropout=True),
    "GPTNeoX": _causal("GPTNeoX", _one_width),
    "Olmo2": _causal("Olmo2"),
    "Olmo3": _causal("Olmo3", _two_kinds),
    "DiffLlama": _causal("DiffLlama"),
    "Bloom": Family(("Bloom", "BloomForCausalLM"), _alibi, kinds=ONE_MASK),
    "Mpt": Family(("Mpt", "MptForCausalLM"), _mpt, kinds=ONE_MASK),
    "DeepseekV3": Family(("DeepseekV3", "DeepseekV3ForCausalLM"), _latent, cuda_head_dim=128),
    "GptOss": _causal("GptOss", lambda size: _experts(size) | _two_kinds(size)),
    "MiMoV2Flash": _causal("MiMoV2Flash", _latent_windows),
    "Llama4": Family(("Llama4Text", "Llama4ForCausalLM"), _chunked),
    "Bert": _masked("Bert", dropout=True),
    "Roberta": _masked("Roberta", dropout=True),
    "ModernBert": _masked("ModernBert", _modern_encoder),
    "Esm": _masked("Esm", _rotary_encoder, dropout=True),
    "T5": Family(("T5", "T5ForConditionalGeneration"), _relative_positions, "text to text", ONE_MASK, dropout=True),
    "Bart": Family(("Bart", "BartForConditionalGeneration"), _two_parts, "text to text", ONE_MASK, dropout=True),
    "Whisper": Family(("Whisper", "WhisperForConditionalGeneration"), _speech, "speech", IMAGES),
    "ViT": Family(("ViT", "ViTForImageClassification"), _vision, "images", IMAGES),
    "Dinov2": Family(("Dinov2", "Dinov2ForImageClassification"), _vision, "images", IMAGES),
    "Siglip": Family(("Siglip", "SiglipModel"), _vision_and_text, "images and text", ("plain", "right")),
}

WITH_CACHE = [name for name, family in FAMILIES.items() if "use_cache" in family.settings(Size(1, 16))]
"""Families whose models return a cache of keys and values by default."""


def build(family: str, *, layers: int = 2, head_dim: int = 16, **settings: Any) -> torch.nn.Module:
    """A model in training mode; its attention is what transformers chooses, with the settings of a fixed seed.

    Args:
        family: a name in `FAMILIES`.
        layers: of each part of the model.
        head_dim: of its attention.
        settings: of its configuration, over the settings of the table.
    """
    import transformers

    described = FAMILIES[family]
    config_class, model_class = described.classes
    values = described.settings(Size(layers, head_dim)) | dict(described.more) | settings
    config = getattr(transformers, f"{config_class}Config")(**values)
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, model_class)(config)
    return model.train()


def inputs_of(family: str, kind: str, *, batch: int = 2, length: int = 40) -> dict[str, Tensor]:
    """The inputs that a data loader sends to a model of a family, with labels; no label where there is no token.

    Args:
        family: a name in `FAMILIES`.
        kind: one of its `kinds`.
        batch, length: of the text; packed documents are one row of `batch * length` tokens.
    """
    reads = FAMILIES[family].reads
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, 32, 32, generator=generator)
    if reads == "images":
        return {"pixel_values": images, "labels": torch.arange(batch) % 2}
    if reads == "speech":
        labels = token_ids(batch, length // 2)
        return {"input_features": torch.randn(batch, 8, 64, generator=generator), "labels": labels}
    if kind == "packed":
        length, batch = batch * length, 1
    tokens = token_ids(batch, length)
    inputs: dict[str, Any] = {"input_ids": tokens}
    if reads == "text":
        inputs["labels"] = tokens
    if kind in ("ones", "right", "left"):
        valid = padding(kind, batch, length)
        inputs["attention_mask"] = valid.long()
        if reads == "text":
            inputs["labels"] = tokens.masked_fill(~valid, -100)
    if kind == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in (1, length // 3, length - length // 3 - 1)])[None]
    if reads == "text to text":
        inputs["labels"] = token_ids(batch, length // 2)
    if reads == "images and text":
        inputs |= {"pixel_values": images, "return_loss": True}
    return inputs


def causal_lm(family: str, *, layers: int = 2, head_dim: int = 16, **settings: Any) -> torch.nn.Module:
    """A model of 4 query and 2 key/value heads per layer, in training mode, with `sdpa` attention and no cache."""
    return build(family, layers=layers, head_dim=head_dim, attn_implementation="sdpa", **settings)


def encoder(family: str, *, layers: int = 2) -> torch.nn.Module:
    """A model of 4 heads per layer that predicts masked tokens, without dropout, in training mode."""
    return build(family, layers=layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def padding(kind: str, batch: int, length: int) -> torch.Tensor:
    """Whether tokens are valid, bool [batch, length]: "ones", or padded on the "left" or "right", or with "holes"."""
    place = torch.arange(length)
    count = torch.arange(batch)[:, None] * (length // batch)
    if kind == "holes":
        return torch.rand(batch, length, generator=torch.Generator().manual_seed(0)) < 0.7
    return {"ones": place >= 0 * count, "left": place >= count, "right": place < length - count}[kind]


def speech_model() -> torch.nn.Module:
    """Whisper, with one encoder and one decoder layer."""
    return build("Whisper", layers=1)


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


def tiny_flex_llama(packed: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A Llama of two layers with FlexAttention, and a batch, which may consist of packed documents."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, attn_implementation="flex_attention",
    )  # fmt: skip
    tokens = torch.randint(0, 64, (2, 128), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    if packed:
        inputs["position_ids"] = torch.cat([torch.arange(70), torch.arange(58)]).repeat(2, 1)
    return LlamaForCausalLM(config).bfloat16(), inputs
