"""Keeps `embedding_dense_backward` whole on CUDA, so that passes see the gradients of embeddings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..config import config
from ..upstream import seams

aten = torch.ops.aten

READERS = frozenset({"embeddings", "tied_embeddings"})
"""The passes that read the operator.  With one of them off, what the other leaves is PyTorch's kernel."""


def install(is_active: Callable[[], bool]) -> None:
    """Keep the operator whole on CUDA, in graphs that are traced while `is_active`.

    Inductor leaves an operator as it is where its decomposition says that it is not to be decomposed, as on XPU.
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
