"""The observers that watch the training run of this process.  Imports nothing, because compilations ask it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .observer import Observer

observers: list[Observer] = []
"""The active observers, in the order in which they began."""


def watching_graphs() -> list[Observer]:
    """The observers to whom compiled graphs show gradients."""
    return [observer for observer in observers if observer.watches_graphs]
