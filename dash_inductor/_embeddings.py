"""Gradients of embeddings: under deterministic algorithms Inductor gets PyTorch's own kernel for them.

Inductor writes such a gradient as an `index_put` that accumulates, and under deterministic algorithms leaves it to a
kernel that adds all rows of an index one after the other: in BERT, whose tokens are nearly all of one type, it takes
more than half as long as the rest of a training step (docs/notes.md).  `aten.embedding_dense_backward` sorts as well,
adds the rows of an index in parts whose order is fixed, and has no atomics; Inductor leaves it as it is where its
decomposition says that it is not to be decomposed, as on XPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def install(is_active: Callable[[], bool]) -> None:
    """Keep the operator whole on CUDA, in graphs that are traced while `is_active`."""
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import fallback_handler, lowerings, register_lowering

    overload = aten.embedding_dense_backward.default
    decompose = decompositions[overload]

    @functools.wraps(decompose)
    def keep(grad_output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if grad_output.device.type == "cuda" and torch.version.hip is None and is_active():
            return NotImplemented
        return decompose(grad_output, *args, **kwargs)

    decompositions[overload] = keep
    if overload not in lowerings:
        register_lowering(overload, type_promotion_kind=None)(fallback_handler(overload))
