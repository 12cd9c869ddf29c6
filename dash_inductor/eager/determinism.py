"""A context manager that switches PyTorch's determinism flag on for the duration of a call."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from ..upstream.eager import set_deterministic_algorithms


class _Deterministic:
    """A context with deterministic algorithms on, for one thread at a time, so that no other thread ends it early.

    If the program has not set the flag itself, operators without a deterministic kernel only warn.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._switched: list[bool] = []

    @property
    def switched_on(self) -> bool:
        """Whether the flag is on only because of a call that is running now."""
        return True in self._switched

    def __enter__(self) -> None:
        self._lock.acquire()
        on = torch.are_deterministic_algorithms_enabled()
        self._switched.append(not on)
        if not on:
            set_deterministic_algorithms(True, warn_only=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._switched.pop():
            set_deterministic_algorithms(False)
        self._lock.release()


DETERMINISTIC = _Deterministic()
