"""A clock that stands still while the monitor does not run."""

from __future__ import annotations

import time
from collections.abc import Callable

AWAY = 2.0
"""Seconds between two readings after which the monitor was away: it reads the clock several times per second."""


class Clock:
    """A clock of the seconds in which the monitor has run.

    A monitor that was stopped, or got no processor, has seen no heartbeats meanwhile.  If its detectors counted that
    time, every rank would be late.

    Args:
        real: returns seconds of a monotonic clock.

    Attributes:
        gaps: the number of times that the monitor was away.
    """

    def __init__(self, real: Callable[[], float] = time.monotonic) -> None:
        self._real, self._last, self._lost = real, real(), 0.0
        self.gaps = 0

    def now(self) -> float:
        """The seconds that the monitor has run; more than `AWAY` seconds between two readings do not count."""
        real = self._real()
        if real - self._last > AWAY:
            self._lost += real - self._last
            self.gaps += 1
        self._last = real
        return real - self._lost
