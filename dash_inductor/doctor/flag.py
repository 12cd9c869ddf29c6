"""PyTorch's flag for deterministic algorithms: its three states, and a context manager that restores it."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..upstream.eager import set_deterministic_algorithms


class Flag(enum.Enum):
    """A state of PyTorch's determinism flag: off, on, or on with warnings instead of errors."""

    OFF = "off"
    WARN_ONLY = "on with warn_only=True"
    ON = "on"

    @classmethod
    def now(cls) -> Flag:
        """Returns the current state of PyTorch's determinism flag."""
        if not torch.are_deterministic_algorithms_enabled():
            return cls.OFF
        return cls.WARN_ONLY if torch.is_deterministic_algorithms_warn_only_enabled() else cls.ON

    def put(self) -> None:
        """Sets PyTorch's flag to this state, without changing Inductor's settings."""
        if Flag.now() is not self:
            set_deterministic_algorithms(self is not Flag.OFF, warn_only=self is Flag.WARN_ONLY)


@contextmanager
def kept() -> Iterator[None]:
    """A context manager that restores the determinism flag at its end.

    It also restores Inductor's setting that `use_deterministic_algorithms` changes.
    """
    from ..upstream.configs import inductor

    before, of_inductor = Flag.now(), inductor.deterministic
    try:
        yield
    finally:
        before.put()
        if inductor.deterministic != of_inductor:
            inductor.deterministic = of_inductor
