"""The observers that watch the training run of this process.  Imports nothing, because compilations ask it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .observer import Observer

observers: list[Observer] = []
"""The active observers, in the order in which they began."""


def watching_graphs() -> list[Observer]:
    """The observers to whom compiled graphs show gradients."""
    return [observer for observer in observers if observer.watches_graphs]


def is_on(observer: object) -> bool:
    """Whether an observer is told what happens."""
    return any(each is observer for each in observers)


@contextmanager
def instead(others: list[Observer]) -> Iterator[None]:
    """Show what happens in a block to others alone: work that is no part of training.

    An observer is not among `observers` meanwhile, and what it has put on modules or tensors must ask for that.
    """
    training = observers[:]
    observers[:] = others
    try:
        yield
    finally:
        observers[:] = training
