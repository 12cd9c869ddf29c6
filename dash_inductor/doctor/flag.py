"""PyTorch's flag for deterministic algorithms: its values, and the block in which a program's value is kept."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..upstream.eager import set_deterministic_algorithms


class Flag(enum.Enum):
    """What `torch.use_deterministic_algorithms` was told last."""

    OFF = "off"
    WARN_ONLY = "on with warn_only=True"
    ON = "on"

    @classmethod
    def now(cls) -> Flag:
        """The present value."""
        if not torch.are_deterministic_algorithms_enabled():
            return cls.OFF
        return cls.WARN_ONLY if torch.is_deterministic_algorithms_warn_only_enabled() else cls.ON

    def put(self) -> None:
        """Let it be the present value; settings of Inductor stay."""
        if Flag.now() is not self:
            set_deterministic_algorithms(self is not Flag.OFF, warn_only=self is Flag.WARN_ONLY)


@contextmanager
def kept() -> Iterator[None]:
    """Let the flag, and Inductor's setting that `use_deterministic_algorithms` makes, be afterwards as they are now."""
    from ..upstream.configs import inductor

    before, of_inductor = Flag.now(), inductor.deterministic
    try:
        yield
    finally:
        before.put()
        if inductor.deterministic != of_inductor:
            inductor.deterministic = of_inductor
