"""Attention as programs write it: with sinks, with log-sum-exp outputs, and decomposed as in gpt_oss and Gemma 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .entry_steps import DEVICE, made, measure, step
from .variants import DASH, DEFAULT

Rows = list[dict[str, Any]]


class _Module(nn.Module):
    """The attributes that an attention function of transformers reads of its module."""

    def __init__(self, groups: int, sinks: Tensor | None = None) -> None:
        super().__init__()
        self.num_key_value_groups, self.sinks = groups, sinks


def additive(window: int | None, length: int, dtype: torch.dtype) -> Tensor:
    """Returns transformers' additive mask, [1, 1, length, length]: causal, optionally with a sliding window."""
    places = torch.arange(length, device=DEVICE)
    distance = places[:, None] - places
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return torch.where(seen, torch.zeros((), device=DEVICE, dtype=dtype), torch.finfo(dtype).min)[None, None]


def by_hand(
    function: Callable[..., Any], groups: int, window: int | None = None, **settings: Any
) -> Callable[..., Tensor]:
    """Returns decomposed attention of q, k, v [batch, heads, length, head dim], and sinks [heads] if there are any."""

    def program(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        mask = additive(window, q.shape[2], q.dtype)
        out: Tensor = function(_Module(groups, sinks), q, k, v, mask, scaling=q.shape[3] ** -0.5, **settings)[0]
        return out

    return program


def _heads(batch: int, length: int, heads: int, kv_heads: int, dim: int) -> list[Tensor]:
    """Returns q, k and v, interleaved in memory as models have them."""
    q, k, v = made(*((batch, length, n, dim) for n in (heads, kv_heads, kv_heads)))
    return [tensor.detach().transpose(1, 2).requires_grad_() for tensor in (q, k, v)]


def sinks(batch: int = 2, length: int = 8192, width: int = 2048) -> Rows:
    """Measures a causal site with sinks, and the same site without."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks
    from transformers.models.llama.modeling_llama import eager_attention_forward as without

    rows = []
    for dim in (64, 128):
        heads = width // dim
        qkv = _heads(batch, length, heads, heads // 4, dim)
        leaves = [*qkv, *made((heads,))]
        steps = {
            "with sinks": lambda leaves=leaves: step(DASH, by_hand(with_sinks, 4), leaves),
            "without": lambda qkv=qkv: step(DASH, by_hand(without, 4), qkv),
        }
        site = f"causal d{dim} b{batch}h{heads}/{heads // 4} s{length}"
        rows += measure(site, steps, repeats=40, same=False)
    return rows


def lse(batch: int = 2, length: int = 8192, width: int = 2048) -> Rows:
    """Measures a causal site whose log-sum-exp the program reads and differentiates, and the same site without."""
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=DEVICE)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)  # type: ignore[return-value]

    def with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)  # type: ignore[return-value]

    rows = []
    for dim in (64, 128):
        heads = width // dim
        qkv = _heads(batch, length, heads, heads // 4, dim)
        steps = {
            "with log-sum-exp": lambda qkv=qkv: step(DASH, with_lse, qkv),
            "without": lambda qkv=qkv: step(DASH, attend, qkv),
        }
        site = f"causal d{dim} b{batch}h{heads}/{heads // 4} s{length}"
        rows += measure(site, steps, repeats=40, same=False)
    return rows


def gpt_oss(batch: int = 1, length: int = 4096, heads: int = 64, kv_heads: int = 8, dim: int = 64) -> Rows:
    """Measures the two kinds of attention layers of gpt_oss, at the width of the 20B model."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    rows = []
    for window in (128, None):
        program = by_hand(eager_attention_forward, heads // kv_heads, window)
        leaves = [*_heads(batch, length, heads, kv_heads, dim), *made((heads,))]
        rows += _against_default(f"gpt_oss {'causal' if window is None else 'window 128'}", program, leaves)
    return rows


def gemma2(batch: int = 1, length: int = 8192, heads: int = 16, kv_heads: int = 8, dim: int = 256) -> Rows:
    """Measures the two kinds of attention layers of Gemma 2, at the width of the 9B model."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    rows = []
    for window in (4096, None):
        program = by_hand(eager_attention_forward, heads // kv_heads, window, softcap=50.0)
        leaves = _heads(batch, length, heads, kv_heads, dim)
        rows += _against_default(f"gemma2 {'causal' if window is None else f'window {window}'}", program, leaves)
    return rows


def _against_default(name: str, program: Callable[..., Tensor], leaves: list[Tensor]) -> Rows:
    batch, heads, length, dim = leaves[0].shape
    site = f"{name} d{dim} b{batch}h{heads}/{leaves[1].shape[1]} s{length}"
    steps = {variant.name: lambda v=variant: step(v, program, leaves) for variant in (DASH, DEFAULT)}
    return measure(site, steps, repeats=10)
