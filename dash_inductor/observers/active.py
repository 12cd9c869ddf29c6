"""The observers that watch the training run of this process: the one table through which dash_inductor calls packages
that observe training, such as dash_guard.  Imports nothing, because compilations ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Graph

    from .observer import Observer


@dataclass(frozen=True)
class Graphs:
    """How a package shows tensors of compiled graphs to observers.

    Attributes:
        package: its name, which is also the namespace of its operators; its sources are part of cache keys.
        show: inserts operators into a joint graph, while an observer has `watches_graphs`; whether the graph changed.
    """

    package: str
    show: Callable[[Graph], bool]


observers: list[Observer] = []
"""The active observers, in the order in which they began."""

graphs: Graphs | None = None
"""What shows tensors of compiled graphs to them, None if no package does."""


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
