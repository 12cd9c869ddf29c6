"""Small models of transformers that the table of models has not, with random weights, and what they are called with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 2


@dataclass(frozen=True)
class Model:
    """A class of models.

    Attributes:
        name: the class of transformers.
        settings: of its configuration.
        inputs: the shapes of what a model is called with: tokens, a mask that hides none of them, or random numbers.
        default_dtype: whether its parameters are converted to the default dtype, which it does not read.
    """

    name: str
    settings: dict[str, Any]
    inputs: dict[str, tuple[int, ...]]
    default_dtype: bool = False

    def model(self) -> nn.Module:
        """A model in training mode."""
        import transformers

        model = getattr(transformers, self.name)
        made: nn.Module = model(model.config_class(**self.settings)).train()
        return made.to(torch.get_default_dtype()) if self.default_dtype else made

    def tensors(self) -> dict[str, Tensor]:
        """Random inputs."""
        made = {
            "ids": lambda shape: torch.randint(0, 32, shape),
            "mask": lambda shape: torch.ones(shape, dtype=torch.int64),
        }
        return {key: made.get(key.split("_")[-1], torch.randn)(shape) for key, shape in self.inputs.items()}


_SIZE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_SPEECH = {
    **_SIZE, "vocab_size": 32, "intermediate_size": 128, "conv_dim": (32, 32), "conv_stride": (5, 2),
    "conv_kernel": (10, 3), "num_conv_pos_embedding_groups": 2, "num_conv_pos_embeddings": 16,
    "apply_spec_augment": False, "layerdrop": 0.0,
}  # fmt: skip
_SAMPLES = {"input_values": (BATCH, 1000)}

WAVLM = Model("WavLMForCTC", _SPEECH, _SAMPLES)
CONFORMER = Model("Wav2Vec2ConformerForCTC", _SPEECH | {"position_embeddings_type": "relative"}, _SAMPLES)
CONFORMER_ROTARY = Model("Wav2Vec2ConformerForCTC", _SPEECH | {"position_embeddings_type": "rotary"}, _SAMPLES)
PERCEIVER = Model(
    "PerceiverForMaskedLM",
    {
        "num_latents": 64, "d_latents": 128, "d_model": 96, "num_self_attends_per_block": 2,
        "num_self_attention_heads": 2, "num_cross_attention_heads": 2, "qk_channels": 64, "v_channels": 128,
        "vocab_size": 32, "max_position_embeddings": 256,
    },
    {"input_ids": (BATCH, 256)},
)  # fmt: skip
SAM = Model(
    "SamModel",
    {
        "vision_config": _SIZE | {
            "image_size": 256, "patch_size": 16, "output_channels": 64, "window_size": 4, "global_attn_indexes": [1],
            "num_pos_feats": 32,
        },
        "prompt_encoder_config": {"hidden_size": 64, "image_size": 256, "patch_size": 16},
        "mask_decoder_config": {
            "hidden_size": 64, "mlp_dim": 64, "num_attention_heads": 2, "num_hidden_layers": 1,
            "iou_head_hidden_dim": 64,
        },
    },
    {"pixel_values": (1, 3, 256, 256), "input_points": (1, 1, 3, 2)},
)  # fmt: skip
Q_FORMER = Model(
    "Blip2QFormerModel",
    _SIZE | {"intermediate_size": 128, "encoder_hidden_size": 96, "cross_attention_frequency": 2},
    {"query_embeds": (BATCH, 32, 128), "encoder_hidden_states": (BATCH, 257, 96)},
)
SWIN_V2 = Model(
    "Swinv2ForImageClassification",
    {"embed_dim": 64, "depths": [2], "num_heads": [2], "window_size": 4, "image_size": 32, "patch_size": 4},
    {"pixel_values": (BATCH, 3, 32, 32)},
)
LONG_T5 = Model(
    "LongT5ForConditionalGeneration",
    {
        "d_model": 128, "d_kv": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2, "vocab_size": 32, "use_cache": False,
        "decoder_start_token_id": 0, "local_radius": 15,
    },
    {"input_ids": (BATCH, 256), "attention_mask": (BATCH, 256), "decoder_input_ids": (BATCH, 64)},
)  # fmt: skip
XLNET = Model(
    "XLNetLMHeadModel",
    {"vocab_size": 32, "d_model": 128, "n_layer": 2, "n_head": 2, "d_inner": 128, "use_mems_train": False},
    {"input_ids": (BATCH, 256), "attention_mask": (BATCH, 256)},
    default_dtype=True,
)
PARAKEET = Model(
    "ParakeetEncoder",
    _SIZE | {"intermediate_size": 128, "num_mel_bins": 32, "subsampling_conv_channels": 8, "layerdrop": 0.0},
    {"input_features": (BATCH, 512, 32), "attention_mask": (BATCH, 512)},
)
_LATENT = _SIZE | {
    "vocab_size": 32, "num_key_value_heads": 2, "q_lora_rank": 64, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "index_head_dim": 64, "index_n_heads": 2, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
_TOKENS = {"input_ids": (BATCH, 256)}
DEEPSEEK_V32 = Model(
    "DeepseekV32ForCausalLM",
    _LATENT | {
        "intermediate_size": 128, "kv_lora_rank": 32, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "index_topk": 64,
    },
    _TOKENS,
)  # fmt: skip
DEEPSEEK_V4 = Model(
    "DeepseekV4ForCausalLM",
    _LATENT | {"num_key_value_heads": 1, "head_dim": 512, "o_groups": 2, "o_lora_rank": 32, "index_topk": 16},
    _TOKENS,
)
