"""The models of `benchmarks.whole_models` at sizes that compile in seconds; each makes (model, inputs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.whole_models import Deformable, DiT, Graph, Preferences, Recommender, Titan, UNet
from benchmarks.whole_models.made import hooked

Made = tuple[nn.Module, dict[str, Any]]

VOCABULARY, WIDTH, BATCH, LENGTH = 1009, 256, 8, 512


def _tokens(*shape: int, below: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, below, shape)


def _language(config: Any) -> Made:
    from transformers import AutoModelForCausalLM

    tokens = _tokens(BATCH, LENGTH)
    return AutoModelForCausalLM.from_config(config), {"input_ids": tokens, "labels": tokens}


def gpt2() -> Made:
    from transformers import GPT2Config

    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    return _language(GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))


def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    tokens = _tokens(BATCH, LENGTH)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH}
    config = BertConfig(**sizes, vocab_size=VOCABULARY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForMaskedLM(config), {"input_ids": tokens, "labels": tokens}


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=4 * WIDTH, decoder_ffn_dim=4 * WIDTH, vocab_size=VOCABULARY, max_source_positions=LENGTH,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    features = torch.randn(BATCH, 80, 2 * LENGTH, dtype=torch.bfloat16)
    return WhisperForConditionalGeneration(config), {"input_features": features, "labels": _tokens(BATCH, 64)}


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=WIDTH, d_kv=64, d_ff=2 * WIDTH, num_layers=2, num_heads=4, dropout_rate=0.0, vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    )  # fmt: skip
    tokens = _tokens(BATCH, LENGTH)
    return T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}


def _decoder(**others: Any) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        **others,
    }  # fmt: skip


def llama() -> Made:
    from transformers import LlamaConfig

    return _language(LlamaConfig(**_decoder(tie_word_embeddings=True)))


def gemma3() -> Made:
    from transformers import Gemma3TextConfig

    return _language(Gemma3TextConfig(**_decoder(head_dim=64, sliding_window=64)))


def mixtral() -> Made:
    from transformers import MixtralConfig

    return _language(MixtralConfig(**_decoder(num_local_experts=4)))


def qwen3_moe() -> Made:
    from transformers import Qwen3MoeConfig

    experts = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
    return _language(Qwen3MoeConfig(**_decoder(head_dim=64, **experts)))


def gpt_oss() -> Made:
    from transformers import GptOssConfig

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return _language(GptOssConfig(**_decoder(head_dim=64, sliding_window=64, **experts)))


def mamba2() -> Made:
    from transformers import Mamba2Config

    config = Mamba2Config(
        hidden_size=WIDTH, num_heads=8, head_dim=64, state_size=32, n_groups=1, chunk_size=64, num_hidden_layers=2,
        vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _language(config)


def deepseek_v3() -> Made:
    from transformers import DeepseekV3Config

    experts = {"moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4}
    ranks = {"q_lora_rank": 128, "kv_lora_rank": 64, "topk_group": 2, "first_k_dense_replace": 1}
    return _language(DeepseekV3Config(**(_decoder() | {"num_key_value_heads": 4}), **experts, **ranks))


def titan_moe() -> Made:
    return Titan(WIDTH, 8, 2, VOCABULARY), {"tokens": _tokens(BATCH, LENGTH)}


def unet() -> Made:
    return UNet(16), {"x": torch.randn(4, 3, 64, 64, dtype=torch.bfloat16)}


def segmentation() -> Made:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(num_labels=19, drop_path_rate=0.0, classifier_dropout_prob=0.0)
    pictures = torch.randn(4, 3, 64, 64, dtype=torch.bfloat16)
    return hooked(SegformerForSemanticSegmentation(config), pictures[:1]), {
        "pixel_values": pictures,
        "labels": _tokens(4, 64, 64, below=19),
    }


def deformable() -> Made:
    return Deformable(64, 2, 4, 2), {"x": torch.randn(2, 3, 128, 96, dtype=torch.bfloat16)}


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH}
    pictures = torch.randn(BATCH, 3, 112, 112, dtype=torch.bfloat16)
    config = ViTConfig(**sizes, image_size=112, num_labels=19)
    return ViTForImageClassification(config), {"pixel_values": pictures, "labels": _tokens(BATCH, below=19)}


def dit() -> Made:
    noisy, noise = torch.randn(2, BATCH, 4, 16, 16, dtype=torch.bfloat16)
    times = {"time": torch.rand(BATCH) * 1000, "label": _tokens(BATCH, below=1000)}
    return DiT(WIDTH, 2), {"noisy": noisy, "noise": noise, **times}


def llava() -> Made:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH}
    picture = CLIPVisionConfig(**sizes, image_size=112, patch_size=14)
    config = LlavaConfig(vision_config=picture, text_config=LlamaConfig(**_decoder()), image_token_index=VOCABULARY - 1)
    tokens = _tokens(BATCH, LENGTH, below=VOCABULARY - 1)
    tokens[:, 1:65] = VOCABULARY - 1
    pictures = torch.randn(BATCH, 3, 112, 112, dtype=torch.bfloat16)
    model = hooked(LlavaForConditionalGeneration(config), pictures[:1], input_ids=tokens[:1])
    return model, {"input_ids": tokens, "pixel_values": pictures, "labels": tokens}


def graph() -> Made:
    nodes, edges = 2000, 20_000
    return Graph(), {
        "x": torch.randn(nodes, 128, dtype=torch.bfloat16, requires_grad=True),
        "source": _tokens(edges, below=nodes),
        "target": (torch.rand(edges) ** 2 * nodes).long(),
    }


def preferences() -> Made:
    hidden = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16)
    return Preferences(WIDTH, VOCABULARY), {"hidden": hidden, "labels": _tokens(BATCH, LENGTH)}


def recommender() -> Made:
    return Recommender(VOCABULARY, 3, 32), {
        "numbers": torch.randn(1024, 16, dtype=torch.bfloat16),
        "indices": (torch.rand(3, 8192) ** 3 * VOCABULARY).long(),
        "starts": torch.arange(1024) * 8,
        "clicked": torch.rand(1024).round(),
    }


MODELS: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (
        *(gpt2, bert, whisper, t5, llama, gemma3, mamba2),
        *(mixtral, qwen3_moe, gpt_oss, deepseek_v3, titan_moe),
        *(unet, segmentation, deformable, vit, dit, llava),
        *(graph, preferences, recommender),
    )
}
