"""Calls of bands, as most tests need them, and of what else the Hopper forward reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash_inductor.model import AttentionSpec, Band, Dense, Dropout, Mask, Operand, Order, Segments, VarlenLayout
from dash_inductor.model.traits import Traits

BSHD: Order = (0, 2, 1, 3)
"""The order of a [batch, heads, length, head dim] tensor whose heads are interleaved."""


def spec_of(band: Band, scale: float) -> AttentionSpec:
    """The call of a site, before the orders of its results are known."""
    return AttentionSpec(Mask(band), scale)


def forward_spec(band: Band, scale: float, order: Sequence[int] = BSHD) -> AttentionSpec:
    """The call of a forward."""
    return AttentionSpec(Mask(band), scale, (tuple(order),))


def backward_spec(band: Band, scale: float, orders: Sequence[Sequence[int]] = (BSHD,) * 3) -> AttentionSpec:
    """The call of a backward."""
    return AttentionSpec(Mask(band), scale, tuple(map(tuple, orders)))


def traits_of(
    band: Band, segment_ids: bool = False, dense: bool = False, dropout: bool = False, varlen: bool = False,
    softcap: bool = False, low_scores: bool = False,
) -> Traits:  # fmt: skip
    """The traits of a call with these components beside the band, and dropout and a bound of scores or not."""
    components, modifiers = ["dense"] * dense + ["segments"] * segment_ids, ("softcap",) * softcap
    return Traits(
        band.lo is not None, band.hi is not None, tuple(components), ("dropout",) * dropout, varlen,
        modifiers=modifiers,
        low_scores=low_scores,
    )  # fmt: skip


def forward_spec_of(
    band: Band, scale: float, data: Any = None, dropout: object = None, order: Sequence[int] = BSHD
) -> AttentionSpec:
    """The call of a forward that is given such a `ForwardData` and dropout."""
    first, second = Operand(0), Operand(1)
    dense = None if data is None or data.seen_bits is None else Dense(first)
    varlen_layout = None if data is None or data.token_counts is None else VarlenLayout(Operand(2), Operand(3))
    segments = None if data is None or dense is not None else Segments(first, second, varlen_layout)
    drops = None if dropout is None else Dropout(0.5, Operand(4))
    return AttentionSpec(Mask(band, segments=segments, dense=dense), scale, (tuple(order),), None, drops)
