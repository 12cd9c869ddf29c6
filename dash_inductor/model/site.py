"""`Site`: the properties of one attention that the planner and the kernels need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ArgumentError
from .attention_spec import AttentionSpec
from .dropout import Dropout
from .mask import Band, Mask
from .relations import BETWEEN, PAIRS

DType = Literal["float16", "bfloat16", "float32"]

BITS: dict[DType, int] = {"float16": 16, "bfloat16": 16, "float32": 32}
"""The width of each dtype, in bits."""

_SHORT: dict[str, DType] = {
    "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32",
}  # fmt: skip


def dtype_named(name: str) -> DType:
    """Return the dtype that a user names, for example "bfloat16" or "bf16".

    Raises:
        ArgumentError: there is no such name.
    """
    names: dict[str, DType] = {dtype: dtype for dtype in BITS} | _SHORT
    if name not in names:
        raise ArgumentError("dtype", name, names)
    return names[name]


NOMINAL_LEN, NOMINAL_BATCH, NOMINAL_HEADS = 2048, 8, 16
"""Values assumed for dynamic sizes, and the problem on which candidate plans are compared: 16384 tokens of width 2048,
large enough that work and waiting dominate and the tail does not."""


@dataclass(frozen=True)
class Site:
    """The properties of one attention that the planner needs.

    Batch and lengths are None if they are dynamic; `head_dim` is that of query and key, `value_dim` that of value.
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
    spec: AttentionSpec
    allow_tf32: bool = False

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.q_heads // self.kv_heads

    @property
    def mask(self) -> Mask:
        """The attention mask of the site's call (`spec.mask`), as components, not as a tensor."""
        return self.spec.mask

    @property
    def band(self) -> Band:
        """The band of the attention's mask."""
        return self.spec.mask.band

    @property
    def scale(self) -> float:
        """The factor of the attention's scores."""
        return self.spec.scale

    @property
    def dropout(self) -> Dropout | None:
        """The dropout of the attention; None without one."""
        return self.spec.dropout

    @property
    def likely_band(self) -> Band | None:
        """The band that a data-dependent mask probably fills; None if the mask is only a band.

        A dense mask without a band is usually causal: this is what a graph gets if the model is split into several
        graphs, as DDP does.  The same holds for an interval, such as a prefix that every query sees.  A schedule for
        causal masks costs other masks nothing, while `ascending` takes nearly twice as long for a causal mask, because
        its CTAs wait (docs/schedules.md).
        """
        if not self.mask.operands:
            return None
        unknown = any(component.RELATION in (PAIRS, BETWEEN) for component in self.mask.components.values())
        return Band(0) if unknown and self.band.is_full else self.band
