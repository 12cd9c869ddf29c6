"""Calls of bands alone, as most tests need them."""

from __future__ import annotations

from collections.abc import Sequence

from dash_inductor.model import Band, Call, Mask, Order

BSHD: Order = (0, 2, 1, 3)
"""The order of a [batch, heads, length, head dim] tensor whose heads are interleaved."""


def call_of(band: Band, scale: float) -> Call:
    """The call of a site, before the orders of its results are known."""
    return Call(Mask(band), scale)


def forward_call(band: Band, scale: float, order: Sequence[int] = BSHD) -> Call:
    """The call of a forward."""
    return Call(Mask(band), scale, (tuple(order),))


def backward_call(band: Band, scale: float, orders: Sequence[Sequence[int]] = (BSHD,) * 3) -> Call:
    """The call of a backward."""
    return Call(Mask(band), scale, tuple(map(tuple, orders)))
