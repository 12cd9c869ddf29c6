"""The attention layer of prime-rl, which calls flash-attn with documents packed into one row."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..support.flash_attn import FA3, fa2_varlen
from . import sources

_MODELS = "prime_rl.trainer.models"
HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 64
ENDS = 0, 100, 256
"""Where documents begin, and the number of tokens."""


def _flash_attn_2(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: int, longest_key: int, *, causal: bool
) -> Any:
    return fa2_varlen(q, k, v, cu_q, cu_k, longest, causal)


def _flash_attn_3(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: int, longest_key: int, *, causal: bool
) -> Any:
    return FA3(q, k, v, causal, cu=cu_q, cu_k=cu_k, longest=longest)


_FUNCTIONS = {2: _flash_attn_2, 3: _flash_attn_3}


def step(version: int, compile_: Any) -> object:
    """One call of a compiled layer with tensors that want gradients.

    The packages of flash-attn need a GPU: functions with their operators and without kernels stand in for them.  So
    does an empty module for the package of all models, of which the layer needs none.

    Args:
        version: that of flash-attn.
        compile_: compiles the layer.
    """
    folder = sources.FOLDER / "prime-rl" / "src" / "prime_rl" / "trainer" / "models"
    if _MODELS not in sys.modules:
        models = ModuleType(_MODELS)
        models.__path__ = [str(folder)]
        sources.module("prime-rl/src", "prime_rl.trainer")
        sys.modules[_MODELS] = models
    layers = sources.module("prime-rl/src", f"{_MODELS}.layers.attn")
    config = layers.AttentionConfig(
        HEADS * HEAD_DIM, HEAD_DIM, HEADS, KEY_HEADS, is_causal=True, attention_bias=False, use_qk_norm=True,
        rms_norm_eps=1e-6,
    )  # fmt: skip
    layers.FlashAttention._funcs = _FUNCTIONS
    layer: nn.Module = layers.FlashAttention(config, version)
    hidden = torch.randn(1, ENDS[-1], HEADS * HEAD_DIM, requires_grad=True)
    places = torch.randn(1, ENDS[-1], HEAD_DIM)
    starts = torch.tensor(ENDS, dtype=torch.int32)
    return compile_(layer)(hidden, (places.cos(), places.sin()), starts, ENDS[-1] - ENDS[1])
