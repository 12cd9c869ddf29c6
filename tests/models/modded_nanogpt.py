"""The attention layer of modded-nanogpt's medium track, which calls FlashAttention-3 with packed documents."""

from __future__ import annotations

import ast
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..support.flash_attn import HUB
from . import sources

_FILE = "train_gpt_medium.py"
_WANTED = ("norm", "rotary", "CastedLinear", "AttnArgs", "CausalSelfAttention")
_HEADS, _HEAD_DIM, _WINDOW = 4, 64, 127
_STARTS = 0, 100, 256, 256
"""Where documents begin, the number of tokens, and that number again: the program pads the list with it."""


def _flash_attn(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, causal: bool, softmax_scale: float, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    documents = {"cu": cu_seqlens_q, "cu_k": cu_seqlens_k, "longest": max_seqlen_q}
    found: Tensor = HUB(q, k, v, causal, window_size, **documents, softmax_scale=softmax_scale)
    return found


def _layers() -> Any:
    """The definitions of the layer as a module: the program itself starts to train when it is imported."""
    path = sources.FOLDER / "modded-nanogpt" / _FILE
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", None) in _WANTED]
    found: Any = ModuleType("modded_nanogpt_layers")
    sys.modules[found.__name__] = found
    found.__dict__.update(
        torch=torch, nn=torch.nn, F=torch.nn.functional, Tensor=Tensor, __file__=str(path),
        args=SimpleNamespace(train_max_seq_len=_STARTS[-1]), grad_accum_steps=1, world_size=1,
        flash_attn_interface=SimpleNamespace(flash_attn_varlen_func=_flash_attn),
    )  # fmt: skip
    exec("from dataclasses import dataclass", found.__dict__)
    exec(compile(tree, str(path), "exec"), found.__dict__)
    return found


def step(compile_: Any, *, key_offset: bool) -> object:
    """One call of a compiled layer, in bfloat16, with tensors that want gradients.

    The kernels of FlashAttention-3 need a GPU: functions with their operators and without kernels stand in for them.

    Args:
        compile_: compiles the layer.
        key_offset: whether a part of the keys is shifted by a token, as in the layers with long windows.
    """
    layers = _layers()
    layer = layers.CausalSelfAttention(_HEADS * _HEAD_DIM, _HEAD_DIM, _HEADS, 0)
    tokens, width = _STARTS[-1], _HEADS * _HEAD_DIM
    places = torch.randn(tokens, _HEAD_DIM // 2).bfloat16()
    args = layers.AttnArgs(
        ve=torch.randn(tokens, width, dtype=torch.bfloat16), sa_lambdas=torch.nn.Parameter(torch.ones(2)),
        seqlens=torch.tensor(_STARTS, dtype=torch.int32), bm_size=_WINDOW, cos=places.cos(), sin=places.sin(),
        attn_scale=0.1, key_offset=key_offset,
    )  # fmt: skip
    return compile_(layer)(torch.randn(1, tokens, width, dtype=torch.bfloat16, requires_grad=True), args)
