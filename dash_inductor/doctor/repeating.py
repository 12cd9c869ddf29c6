"""The interface for running a program's first step again, which a package such as dash_guard provides.

The entry point `repeat` of the group `dash_inductor.doctor` names a class whose instances are `Repeating`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import entry_points

from ..observers.observer import Observer
from .findings import Seen

GROUP = "dash_inductor.doctor"


class Repeating(Observer, ABC):
    """Runs the program's calls of outermost modules again after their backward, and compares the bits of both runs."""

    @abstractmethod
    def backward_ended(self) -> None:
        """Called when a backward of the program has ended."""

    @abstractmethod
    def end(self) -> None:
        """Called when no more backwards will follow."""

    @abstractmethod
    def shown(self, ran_in: Callable[[str], list[str]]) -> Iterator[Seen]:
        """Yields the findings of the repetitions: whether each call gave equal bits.

        Args:
            ran_in: returns, for a module's name, the possibly nondeterministic operators that ran in it, in words.
        """


def repeating(quiet: Callable[[], AbstractContextManager[None]]) -> Repeating | None:
    """Makes an instance of the `Repeating` class that another package provides; None if no package does.

    Args:
        quiet: returns a context manager in which the doctor records nothing.

    Raises:
        Exception: the class cannot be imported, or its constructor fails.
        TypeError: it is not a subclass of `Repeating`.
    """
    for point in entry_points(group=GROUP, name="repeat"):
        made = point.load()(quiet)
        if not isinstance(made, Repeating):
            raise TypeError(f"{point.value} is not allowed: expected a subclass of {__name__}.Repeating")
        return made
    return None
