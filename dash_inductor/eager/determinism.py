"""PyTorch's flag for deterministic algorithms, on for the time of a call."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from ..upstream.eager import set_deterministic_algorithms


class _Deterministic:
    """Deterministic algorithms are on inside, for one thread at a time; another thread cannot end that early.

    Operators of PyTorch without a deterministic kernel only warn, unless the program itself asked for an error.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._switched: list[bool] = []

    @property
    def switched_on(self) -> bool:
        """Whether the flag is on because of a call that is running now."""
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
