"""The package flash-attn, with the operators and autograd functions of its sources, and without its kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from ..support.hf_models import build, token_ids
from . import sources

_ENDS = 0, 100, 256
"""Where documents begin, and the number of tokens."""


def _package() -> None:
    """Import it.  Its extension needs a GPU; for fake tensors the operators have shape functions instead."""
    sys.modules.setdefault("flash_attn_2_cuda", mock.MagicMock())
    sources.module("flash-attn", "flash_attn")


def layer(compile_: Callable[[Any], Any], **settings: Any) -> object:
    """One call of its compiled attention layer, with 4 heads of 64, with tensors that want gradients.

    Args:
        compile_: compiles the layer.
        settings: of `flash_attn.modules.mha.MHA`.
    """
    _package()
    mha = sources.module("flash-attn", "flash_attn.modules.mha")
    made = mha.MHA(256, 4, causal=True, use_flash_attn=True, **settings)
    return compile_(made)(torch.randn(2, 256, 256, requires_grad=True))


def llama(compile_: Callable[[Any], Any], *, packed: bool) -> object:
    """One call of a compiled Llama of transformers with `attn_implementation="flash_attention_2"`.

    Args:
        compile_: compiles the model.
        packed: whether the batch is one row of documents, with their starts, as a `DataCollatorWithFlattening` with
            `return_flash_attn_kwargs` gives them.
    """
    from transformers import modeling_flash_attention_utils as of_transformers

    def yes(*args: object, **settings: object) -> bool:
        return True

    _package()
    tokens = token_ids(1 if packed else 2, _ENDS[-1]).to("cuda")
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if packed:
        starts, longest = torch.tensor(_ENDS, dtype=torch.int32), _ENDS[-1] - _ENDS[1]
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in (_ENDS[1], longest)])[None]
        inputs |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
    found = {"general_availability_check": yes, "pkg_availability_check": yes, "supported_devices": ((yes, "cuda"),)}
    with (
        mock.patch.object(of_transformers, "is_flash_attn_2_available", yes),
        mock.patch.dict(of_transformers.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], found),
    ):
        model: Any = build("Llama", head_dim=64)
        model.set_attn_implementation("flash_attention_2")
        return compile_(model)(**inputs)
