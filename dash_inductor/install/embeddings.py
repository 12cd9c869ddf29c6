"""Keeps Inductor from decomposing `embedding_dense_backward` on CUDA, so that passes see gradients of embeddings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..config import config
from ..upstream import seams

aten = torch.ops.aten

READERS = frozenset({"embeddings", "tied_embeddings"})
"""The passes that replace the operator.  If only one of them is on, the calls that it keeps run PyTorch's kernel."""


def install(is_active: Callable[[], bool]) -> None:
    """Disables the decomposition of `embedding_dense_backward` on CUDA in graphs traced while `is_active()` is true.

    The wrapped decomposition returns NotImplemented, as PyTorch's own does on XPU; Inductor then keeps the operator.
    """
    from ..upstream.inductor import fallback_handler, lowerings, register_lowering

    decompositions = seams.DECOMPOSITIONS.value()
    overload = aten.embedding_dense_backward.default
    decompose = decompositions[overload]

    @functools.wraps(decompose)
    def keep(grad_output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        on_cuda = grad_output.device.type == "cuda" and torch.version.hip is None
        if on_cuda and not READERS.isdisjoint(config.rewrites) and is_active():
            return NotImplemented
        return decompose(grad_output, *args, **kwargs)

    decompositions[overload] = keep
    if overload not in lowerings:
        register_lowering(overload, type_promotion_kind=None)(fallback_handler(overload))
