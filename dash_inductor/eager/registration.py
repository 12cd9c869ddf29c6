"""What a program calls: the attention under one name, where PyTorch and transformers look for implementations."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

from torch.nn.attention import register_flash_attention_impl

NAME = "dash_inductor"
"""The name of the implementation in both registers."""


def register() -> None:
    """Offer attention of dash_inductor to programs that are not compiled, under the name "dash_inductor".

    A program then chooses it:

    - ``attn_implementation="dash_inductor"`` is an attention of transformers, if that is installed.  It compiles the
      attention alone, at its first call, and replaces it as in a program that is compiled.
    - ``torch.nn.attention.activate_flash_attention_impl("dash_inductor")`` has every `scaled_dot_product_attention` on
      a GPU that PyTorch sends to its FlashAttention kernels run here, until `restore_flash_attention_impl`.  Nothing is
      compiled but the kernels.

    Neither needs `torch.use_deterministic_algorithms`.  Calling this again changes nothing.

    Warns:
        RuntimeWarning: transformers is installed and has no such register, or cannot be imported.
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
    from .flash import activate  # what it imports is for programs that use it

    return activate()
