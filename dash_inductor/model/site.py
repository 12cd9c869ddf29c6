"""`Site`: what matching found of one attention, as the planner and the kernels need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .call import Call
from .dropout import Dropout
from .mask import Band, Mask
from .relations import BETWEEN, PAIRS

DType = Literal["float16", "bfloat16", "float32"]

BITS: dict[DType, int] = {"float16": 16, "bfloat16": 16, "float32": 32}
"""Widths of the dtypes."""

NOMINAL_LEN, NOMINAL_BATCH, NOMINAL_HEADS = 2048, 8, 16
"""The values of dynamic sizes, and the problem on which candidates are compared: 16384 tokens of width 2048, where work
and waits decide, not the tail."""


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

    @property
    def likely_band(self) -> Band | None:
        """The band that the tile pairs seen under a mask that is data are likely to fill; None where it is a band.

        A dense mask that comes without a band is causal more often than not: it is what a graph gets where a model is
        cut, as DDP cuts it; and so is an interval, as of a prefix that everyone sees.  A schedule for causal masks
        costs others nothing, while `ascending` takes nearly twice as long for a causal one, and its CTAs wait
        (docs/schedules.md).
        """
        if not self.mask.operands:
            return None
        unknown = any(term.RELATION in (PAIRS, BETWEEN) for term in self.mask.terms.values())
        return Band(0) if unknown and self.band.is_full else self.band
