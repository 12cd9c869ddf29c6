"""Switches off, during calls, PyTorch's filling of uninitialized memory (with NaN, under deterministic algorithms).

The flag is `torch.utils.deterministic.fill_uninitialized_memory`, which is global to the process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from torch._C import _get_deterministic_fill_uninitialized_memory as is_filled
from torch._C import _set_deterministic_fill_uninitialized_memory as set_filled


class _Off:
    """Counts the calls that run without the fill, on any thread; the last one to end restores the flag."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running = 0

    def begin(self) -> bool:
        """Starts a call without the fill.

        Returns:
            Whether `end` must be called: True if the fill was on, or off only because of other calls without it.
        """
        with self.lock:
            if not self.running and not is_filled():
                return False
            self.running += 1
            set_filled(False)
            return True

    def end(self) -> None:
        with self.lock:
            self.running -= 1
            if not self.running:
                set_filled(True)

    def in_child(self) -> None:
        """Restores the flag in a forked process, which does not have the threads whose calls were running."""
        if self.running:
            set_filled(True)
        self.__init__()  # type: ignore[misc]


_OFF = _Off()
os.register_at_fork(after_in_child=_OFF.in_child)


def without_fill(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps `call` so that PyTorch does not fill uninitialized memory while it runs, nor on other threads meanwhile."""

    def run(inputs: Any) -> Any:
        if not _OFF.begin():
            return call(inputs)
        try:
            return call(inputs)
        finally:
            _OFF.end()

    return run
