"""Small models of diffusers with random weights, of each kind of attention processor, and what they are called with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 2


@dataclass(frozen=True)
class Family:
    """A class of models.

    Attributes:
        name: the class of diffusers.
        settings: of its models.
        inputs: the shapes of what a model is called with, beside a number of a step for each element of the batch.
    """

    name: str
    settings: dict[str, Any]
    inputs: dict[str, tuple[int, ...]]

    def model(self) -> nn.Module:
        """A model in training mode."""
        import diffusers

        made: nn.Module = getattr(diffusers, self.name)(**self.settings)
        return made.train()

    def tensors(self) -> dict[str, Tensor]:
        """Random inputs."""
        found = {key: torch.randn(shape) for key, shape in self.inputs.items()}
        return found | {"timestep": torch.ones(BATCH)}


_TEXT = (BATCH, 77, 32)
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 64}

UNET = Family(
    "UNet2DConditionModel",
    {
        "block_out_channels": (64, 128), "layers_per_block": 1, "sample_size": 32, "cross_attention_dim": 32,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": 2,
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    },
    {"sample": (BATCH, 4, 32, 32), "encoder_hidden_states": _TEXT},
)  # fmt: skip
SD3 = Family(
    "SD3Transformer2DModel",
    {
        "sample_size": 32, "in_channels": 4, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 32,
        "caption_projection_dim": 128, "pooled_projection_dim": 64, **_HEADS,
    },
    {"hidden_states": (BATCH, 4, 32, 32), "encoder_hidden_states": _TEXT, "pooled_projections": (BATCH, 64)},
)  # fmt: skip
FLUX = Family(
    "FluxTransformer2DModel",
    {
        "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 32,
        "pooled_projection_dim": 32, "axes_dims_rope": (16, 24, 24), **_HEADS,
    },
    {
        "hidden_states": (BATCH, 64, 4), "encoder_hidden_states": _TEXT, "pooled_projections": (BATCH, 32),
        "img_ids": (64, 3), "txt_ids": (77, 3),
    },
)  # fmt: skip
COGVIDEOX = Family(
    "CogVideoXTransformer3DModel",
    {
        "in_channels": 4, "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": 32, "num_layers": 2,
        "sample_width": 16, "sample_height": 16, "sample_frames": 9, "max_text_seq_length": 77, **_HEADS,
    },
    {"hidden_states": (BATCH, 3, 4, 16, 16), "encoder_hidden_states": _TEXT},
)  # fmt: skip
WAN = Family(
    "WanTransformer3DModel",
    {
        "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 64, "ffn_dim": 64, "num_layers": 2,
        "rope_max_seq_len": 32, **_HEADS,
    },
    {"hidden_states": (BATCH, 4, 3, 16, 16), "encoder_hidden_states": _TEXT},
)  # fmt: skip
