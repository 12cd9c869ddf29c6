"""Models whose training steps pay for determinism outside of attention: few layers of realistic width.

Batches are so large that the GPU is what a step waits for: with 8 rows, T5 and Whisper wait for the host, which takes
50 us for a call of cuBLAS.

Each entry of `MODELS` makes (model, inputs) on the current device; the model returns its loss, or a result whose
``loss`` it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, dict[str, Any]]


def _tokens(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(0, vocabulary, shape)


def _causal(config: Any, vocabulary: int, batch: int, length: int) -> Made:
    from transformers import AutoModelForCausalLM

    tokens = _tokens(vocabulary, batch, length)
    return AutoModelForCausalLM.from_config(config), {"input_ids": tokens, "labels": tokens}


def gpt2() -> Made:
    from transformers import GPT2Config

    return _causal(GPT2Config(n_layer=4, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0), 50257, 8, 1024)


def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    tokens = _tokens(30522, 32, 512)
    config = BertConfig(num_hidden_layers=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForMaskedLM(config), {"input_ids": tokens, "labels": tokens}


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=768, encoder_layers=4, decoder_layers=4, encoder_attention_heads=12, decoder_attention_heads=12,
        encoder_ffn_dim=3072, decoder_ffn_dim=3072, vocab_size=51865,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(24, 80, 3000, dtype=torch.bfloat16),
        "labels": _tokens(51865, 24, 448),
    }


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=768, d_kv=64, d_ff=2048, num_layers=4, num_heads=12, dropout_rate=0.0, decoder_start_token_id=0
    )
    tokens = _tokens(32128, 32, 512)
    return T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}


def llama() -> Made:
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256,
    )  # fmt: skip
    return _causal(config, 128256, 2, 4096)


def gemma3() -> Made:
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=1152, intermediate_size=6912, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, vocab_size=32768,
    )  # fmt: skip
    return _causal(config, 32768, 4, 2048)


_MOE = {"hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4}


def mixtral() -> Made:
    from transformers import MixtralConfig

    return _causal(MixtralConfig(**_MOE, intermediate_size=3584, vocab_size=32000), 32000, 4, 2048)


def qwen3_moe() -> Made:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        **_MOE, head_dim=64, moe_intermediate_size=384, num_experts=64, num_experts_per_tok=8, vocab_size=32000
    )
    return _causal(config, 32000, 4, 2048)


def gpt_oss() -> Made:
    from transformers import GptOssConfig

    config = GptOssConfig(
        **_MOE, head_dim=64, intermediate_size=1024, num_local_experts=16, num_experts_per_tok=4, vocab_size=32000
    )
    return _causal(config, 32000, 4, 2048)


class UNet(nn.Module):
    """Three levels of convolutions, with bilinear upsampling."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = (3, width, 2 * width, 4 * width)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(
            nn.Conv2d(b + a, a, 3, padding=1) for a, b in ((2 * width, 4 * width), (width, 2 * width))
        )
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        target, kept = x, []
        for i, layer in enumerate(self.down):
            x = F.silu(layer(x if i == 0 else F.avg_pool2d(x, 2)))
            kept.append(x)
        for layer, beside in zip(self.up, kept[-2::-1], strict=False):
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = F.silu(layer(torch.cat([x, beside], 1)))
        return F.mse_loss(self.head(x).float(), target.float())


def unet() -> Made:
    return UNet(), {"x": torch.randn(16, 3, 256, 256, dtype=torch.bfloat16)}


class Graph(nn.Module):
    """Two layers of GraphSAGE: means of neighbours by scatter_add."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.own, self.other = (nn.ModuleList(nn.Linear(width, width) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        count = torch.zeros(x.shape[0], device=x.device).index_add(
            0, target, torch.ones_like(target, dtype=torch.float32)
        )
        for own, other in zip(self.own, self.other, strict=True):
            sums = torch.zeros_like(x).index_add(0, target, x[source])
            x = F.relu(own(x) + other(sums / count.clamp(min=1).to(x.dtype)[:, None]))
        return x.float().square().mean()


def graph() -> Made:
    nodes, edges = 100_000, 1_000_000
    return Graph(), {
        "x": torch.randn(nodes, 128, dtype=torch.bfloat16, requires_grad=True),
        "source": _tokens(nodes, edges),
        "target": (torch.rand(edges) ** 2 * nodes).long(),
    }


class Preferences(nn.Module):
    """The loss of direct preference optimisation on logits of a projection: log-probabilities by gather."""

    def __init__(self, width: int = 1024, vocabulary: int = 64_000) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        log_p = self.head(hidden + self.mlp(hidden)).float().log_softmax(-1)
        chosen, rejected = log_p.gather(-1, labels[..., None]).squeeze(-1).sum(1).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def preferences() -> Made:
    return Preferences(), {
        "hidden": torch.randn(4, 1024, 1024, dtype=torch.bfloat16),
        "labels": _tokens(64_000, 4, 1024),
    }


MODELS: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (gpt2, bert, whisper, t5, llama, gemma3, mixtral, qwen3_moe, gpt_oss, unet, graph, preferences)
}
