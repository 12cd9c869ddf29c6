"""Registers dash_inductor's attention with PyTorch's and transformers' registries of implementations."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

from torch.nn.attention import register_flash_attention_impl

NAME = "dash_inductor"
"""The name of the implementation in both registries."""


def register() -> None:
    """Registers dash_inductor's attention, under the name "dash_inductor", for programs that are not compiled.

    A program then selects it in one of two ways:

    - ``attn_implementation="dash_inductor"`` selects it in transformers, if that is installed.  The attention alone is
      compiled, at its first call, and replaced as in a compiled program.
    - ``torch.nn.attention.activate_flash_attention_impl("dash_inductor")`` replaces every
      `scaled_dot_product_attention` on a GPU that PyTorch would run with its FlashAttention kernels, until
      `restore_flash_attention_impl`.  Only kernels are compiled.

    Neither needs `torch.use_deterministic_algorithms`.  Further calls of this function change nothing.

    Warns:
        RuntimeWarning: transformers is installed but has no such registry, or cannot be imported.
    """
    register_flash_attention_impl(NAME, register_fn=_activate)
    if find_spec("transformers") is None:
        return
    try:
        from . import in_transformers
    except ImportError as error:
        what = f'attn_implementation="{NAME}" is not offered to transformers: {error}'
        warnings.warn(what, RuntimeWarning, stacklevel=2)
        return
    in_transformers.register(NAME)


def _activate() -> Any:
    from .flash import activate  # imported here, because only programs that use it need it

    return activate()
