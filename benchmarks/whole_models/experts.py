"""Mixture-of-experts language models."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .made import Made, causal, numbers

_MOE = {"hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4}


def mixtral() -> Made:
    from transformers import MixtralConfig

    return causal(MixtralConfig(**_MOE, intermediate_size=3584, vocab_size=32000), 4, 2048)


def qwen3_moe() -> Made:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        **_MOE, head_dim=64, moe_intermediate_size=384, num_experts=64, num_experts_per_tok=8, vocab_size=32000
    )
    return causal(config, 4, 2048)


def gpt_oss() -> Made:
    from transformers import GptOssConfig

    config = GptOssConfig(
        **_MOE, head_dim=64, intermediate_size=1024, num_local_experts=16, num_experts_per_tok=4, vocab_size=32000
    )
    return causal(config, 4, 2048)


def deepseek_v3() -> Made:
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        hidden_size=1024, intermediate_size=4096, moe_intermediate_size=512, num_hidden_layers=2,
        first_k_dense_replace=1, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=768, kv_lora_rank=256,
        n_routed_experts=32, num_experts_per_tok=4, n_group=4, topk_group=2, vocab_size=32000,
    )  # fmt: skip
    return causal(config, 4, 2048)


def deterministic_scatter_add() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """torchtitan's operator that adds rows, deterministically in every program; it is made once."""
    if not hasattr(torch.ops.torchtitan, "deterministic_scatter_add"):

        def run(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
            before = torch.are_deterministic_algorithms_enabled()
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            torch.use_deterministic_algorithms(True)
            try:
                return out.scatter_add(0, index, src)
            finally:
                torch.use_deterministic_algorithms(before, warn_only=warns)

        made = torch.library.custom_op("torchtitan::deterministic_scatter_add", run, mutates_args=())
        made.register_fake(lambda out, index, src: torch.empty_like(out))
        made.register_autograd(
            lambda ctx, grad: (grad, None, grad.gather(0, ctx.saved_tensors[0])),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
        )
    operator: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.ops.torchtitan.deterministic_scatter_add
    return operator


class Experts(nn.Module):
    """torchtitan's layer of experts, written plainly: tokens sorted by expert, products of groups, and one sum."""

    def __init__(self, width: int, hidden: int, experts: int, top: int) -> None:
        super().__init__()
        self.experts, self.top = experts, top
        self.router = nn.Linear(width, experts, bias=False)
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(experts))
        self.gate, self.up = (nn.Parameter(torch.randn(experts, hidden, width) * width**-0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.add = deterministic_scatter_add()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        scores = self.router(rows).float().sigmoid()
        chosen = (scores + self.bias).topk(self.top, -1, sorted=False).indices
        top = scores.gather(1, chosen)
        top = top / (top.sum(-1, keepdim=True) + 1e-20)
        counts = torch.histc(chosen.flatten(), bins=self.experts, min=0, max=self.experts)
        ends = counts.cumsum(0, dtype=torch.int32)
        order = chosen.flatten().argsort(stable=True)
        tokens = order // self.top
        given = rows[tokens]
        hidden = F.silu(torch._grouped_mm(given, self.gate.mT, ends)) * torch._grouped_mm(given, self.up.mT, ends)
        out = torch._grouped_mm(hidden, self.down.mT, ends)
        out = (out.float() * top.flatten()[order][:, None]).to(x.dtype)
        index = tokens[:, None].expand(-1, rows.shape[1])
        return self.add(torch.zeros_like(rows), index, out).view_as(x)


class Titan(nn.Module):
    """Layers of causal attention and torchtitan's experts, with a shared expert, between an embedding and logits."""

    def __init__(
        self, width: int = 1024, experts: int = 32, top: int = 4, vocabulary: int = 32000, layers: int = 2
    ) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers + 1))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(width, width // 2, experts, top) for _ in range(layers))
        self.shared = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width // 2), nn.SiLU(), nn.Linear(width // 2, width)) for _ in range(layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for i, (qkv, out, experts, shared) in enumerate(
            zip(self.qkv, self.out, self.experts, self.shared, strict=True)
        ):
            q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in qkv(self.norms[2 * i](x)).chunk(3, -1))
            x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            y = self.norms[2 * i + 1](x)
            x = x + experts(y) + shared(y)
        logits = self.head(self.norms[-1](x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def titan_moe() -> Made:
    return Titan(), {"tokens": numbers(32000, 4, 2048)}
