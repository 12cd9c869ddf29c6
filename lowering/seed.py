"""Lowering of `dash::dropout_seed`: Inductor's own draw of a seed, which CUDA graphs and its wrappers know."""

from __future__ import annotations

from torch._inductor import inductor_prims
from torch._inductor.ir import TensorBox
from torch._inductor.lowering import lowerings, register_lowering

from .. import ops


def register() -> None:
    register_lowering(ops.dropout_seed, type_promotion_kind=None)(dropout_seed)


def dropout_seed(like: TensorBox, site: str) -> TensorBox:
    """A seed of one site; shapes as in `ops`."""
    seed: TensorBox = lowerings[inductor_prims.seeds](1, like.get_device())
    return seed
