"""`Site`: what matching found of one attention, as the planner and the kernels need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .call import Call
from .dropout import Dropout
from .mask import Band, Mask

DType = Literal["float16", "bfloat16", "float32"]


@dataclass(frozen=True)
class Site:
    """Facts of one attention, as the planner needs them.

    Lengths and batch are None when they are dynamic; `head_dim` is the dimension of q and k, `value_dim` that of v.
    """

    device: Literal["cuda", "cpu"]
    dtype: DType
    batch: int | None
    q_heads: int
    kv_heads: int
    q_len: int | None
    kv_len: int | None
    head_dim: int
    value_dim: int
    call: Call
    allow_tf32: bool = False

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q_heads // self.kv_heads

    @property
    def mask(self) -> Mask:
        """The mask of the call."""
        return self.call.mask

    @property
    def band(self) -> Band:
        """The band of the call's mask."""
        return self.call.mask.band

    @property
    def scale(self) -> float:
        """The scale of the call's scores."""
        return self.call.scale

    @property
    def dropout(self) -> Dropout | None:
        """The dropout of the call."""
        return self.call.dropout
