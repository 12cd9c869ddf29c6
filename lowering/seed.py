"""Lowering of `dropout_seed`: an element of the random numbers that Inductor draws once per graph, as CUDA graphs
need.
"""

from __future__ import annotations

import torch

from ..errors import DashError
from ..operators import attention as ops
from ..upstream.inductor import TensorBox, V, lowerings, register_lowering

aten = torch.ops.aten


def register() -> None:
    register_lowering(ops.dropout_seed, type_promotion_kind=None)(dropout_seed)


def dropout_seed(drawn: TensorBox, site: str) -> TensorBox:
    """A seed of one site; shapes as in `ops`.

    Raises:
        DashError: in a backward graph.  PyTorch's partitioner saves the seeds of the forward unless it is told to save
            nothing, for which `passes.attention.sites` looks; this is for what else may tell it.
    """
    if V.graph.is_backward:
        raise DashError(f"the seed of dropout of {site} would be drawn again in the backward, where it is another one")
    seed: TensorBox = lowerings[aten.clone](lowerings[aten.unsqueeze](drawn, 0))
    return seed
