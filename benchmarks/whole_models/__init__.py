"""Models whose training steps are measured: few layers of realistic width.

Those of `long` spend much of a step in attention; the others cover the cost of determinism in other operators.

Batches are large enough for a step to be bound by the GPU: with 8 rows, T5 and Whisper wait for the host, which takes
50 us per cuBLAS call.

Each entry of `MODELS` makes (model, inputs) on the current device; the model returns its loss, or a result with the
attribute ``loss``.
"""

from __future__ import annotations

from collections.abc import Callable

from .experts import Titan, deepseek_v3, gpt_oss, mixtral, qwen3_moe, titan_moe
from .language import bert, gemma3, gpt2, llama, mamba2, t5, whisper
from .long import LONG
from .made import Made
from .others import Graph, Preferences, Recommender, graph, preferences, recommender
from .vision import Deformable, DiT, UNet, deformable, dit, llava, segmentation, unet, vit

MODELS: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (
        *(gpt2, bert, whisper, t5, llama, gemma3, mamba2),
        *(mixtral, qwen3_moe, gpt_oss, deepseek_v3, titan_moe),
        *(unet, segmentation, deformable, vit, dit, llava),
        *(graph, preferences, recommender),
        *LONG,
    )
}

__all__ = ["LONG", "MODELS", "Deformable", "DiT", "Graph", "Made", "Preferences", "Recommender", "Titan", "UNet"]
