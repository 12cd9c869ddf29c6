"""Inductor lowering of `dropout_seed`: the seed is one of the random numbers that Inductor draws once per graph.

CUDA graphs need them to be drawn this way.
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
    """Lowers the operator `dropout_seed`; returns the seed of one attention site, int64 [1], with the value of `drawn`.

    Args:
        drawn: an int64 scalar, one of the random numbers that Inductor draws for the graph.
        site: the name of the site, for the error.

    Raises:
        DashError: the graph is a backward, in which another number would be drawn.  PyTorch's partitioner saves the
            seed of the forward unless a setting makes it save nothing; `passes.attention.sites` keeps sites under the
            settings that it knows.
    """
    if V.graph.is_backward:
        raise DashError(f"the seed of dropout of {site} would be drawn again in the backward, where it is another one")
    seed: TensorBox = lowerings[aten.clone](lowerings[aten.unsqueeze](drawn, 0))
    return seed
