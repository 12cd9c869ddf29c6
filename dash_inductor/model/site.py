"""`Site`: what matching found of one attention backward, as the planner and the kernels need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .call import Call
from .mask import Band, Mask

DType = Literal["float16", "bfloat16", "float32"]


@dataclass(frozen=True)
class Site:
    """Facts of one attention, as the planner needs them.

    Lengths and batch are None when they are dynamic; `head_dim` is the dimension of q and k, `value_dim` that of v.
    Of dynamic lengths may be known: `square`, that q_len equals kv_len; `q_within_kv`, that it is at most kv_len;
    `least_q_len`, a lower bound of q_len.  For static lengths all three follow from the lengths.
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
    square: bool = False
    q_within_kv: bool = False
    least_q_len: int = 1

    def __post_init__(self) -> None:
        if self.q_len is not None:
            object.__setattr__(self, "least_q_len", self.q_len)
        if self.q_len is not None and self.kv_len is not None:
            object.__setattr__(self, "square", self.q_len == self.kv_len)
            object.__setattr__(self, "q_within_kv", self.q_len <= self.kv_len)
        elif self.square:
            object.__setattr__(self, "q_within_kv", True)

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
