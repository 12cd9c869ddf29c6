"""What runs the first step of a program again: a package can offer it, as dash_guard does, by an entry point.

The entry point `repeat` of the group `dash_inductor.doctor` names a class whose instances are `Repeating`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import Any

from ..observers.observer import Observer
from .findings import Seen

GROUP = "dash_inductor.doctor"


class Repeating(Observer):
    """Makes the calls of outermost modules again that a backward has gone through, and compares the bits."""

    def backward_ended(self) -> None:
        """A backward has ended."""
        raise NotImplementedError

    def end(self) -> None:
        """Wait for no backward any more."""
        raise NotImplementedError

    def shown(self, ran_in: Callable[[str], list[str]]) -> Iterator[Seen]:
        """What the repetitions have shown.

        Args:
            ran_in: gives what is known to have run in a module that may not be deterministic.
        """
        raise NotImplementedError


def repeating(quiet: Callable[[], AbstractContextManager[None]]) -> Repeating | None:
    """An instance of the class that is installed, None if there is none.

    Args:
        quiet: gives a block in which nobody else looks at what runs.
    """
    for point in entry_points(group=GROUP, name="repeat"):
        made: Any = point.load()(quiet)
        return made if isinstance(made, Repeating) else None
    return None
