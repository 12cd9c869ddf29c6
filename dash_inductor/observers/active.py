"""The list of observers that get the events of the training run in this process.

dash_inductor calls packages that observe training, such as dash_guard, only through this module.  It imports nothing,
because every compile reads it.
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
    """The functions with which a package passes tensors of compiled graphs to observers.

    Attributes:
        package: the package's name and the namespace of its operators; its sources become part of cache keys.
        show: inserts operators into a joint graph while an observer has `watches_graphs`; returns whether the graph
            changed.
    """

    package: str
    show: Callable[[Graph], bool]


observers: list[Observer] = []
"""The active observers, in the order of their activation."""

graphs: Graphs | None = None
"""The package that passes tensors of compiled graphs to observers; None if there is none."""


def watching_graphs() -> list[Observer]:
    """The active observers that receive attention gradients from compiled graphs (`Observer.watches_graphs`)."""
    return [observer for observer in observers if observer.watches_graphs]


def is_on(observer: object) -> bool:
    """Whether an observer is active."""
    return any(each is observer for each in observers)


@contextmanager
def instead(others: list[Observer]) -> Iterator[None]:
    """A context manager that replaces the active observers by `others`, for work that is not part of training.

    The previous observers get no events meanwhile; hooks that they have put on modules or tensors must check `is_on`.
    """
    training = observers[:]
    observers[:] = others
    try:
        yield
    finally:
        observers[:] = training
