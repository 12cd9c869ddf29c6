"""On and off, in code.  Standard library only.

The switch is read while a graph is compiled; what is compiled already stays as it was compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import _dash_inductor_state as _state

_on = True  # for the process
_here: ContextVar[bool | None] = ContextVar("dash_inductor_switch", default=None)  # for a block; None: as the process


def enable() -> None:
    """Let graphs that are compiled from now on use dash_inductor (the initial state).

    DASH_INDUCTOR=0 is stronger: then this only warns.
    """
    global _on
    _on = True
    if _state.off_by_environment():
        warnings.warn("dash_inductor.enable() has no effect: DASH_INDUCTOR=0 is set", RuntimeWarning, stacklevel=2)


def disable() -> None:
    """Compile from now on as plain PyTorch does: same graphs, same cache keys.  Compiled functions stay as they are."""
    global _on
    _on = False


def is_enabled() -> bool:
    """Whether a graph that is compiled here and now under deterministic algorithms uses dash_inductor."""
    return off_reason() is None


@contextmanager
def disabled() -> Iterator[None]:
    """Compile as plain PyTorch does inside the block (in this thread or task)."""
    with override(False):
        yield


@contextmanager
def override(value: bool) -> Iterator[None]:
    """Switch dash_inductor on or off inside the block (in this thread or task), whatever the process's switch says."""
    token = _here.set(value)
    try:
        yield
    finally:
        _here.reset(token)


def off_reason() -> str | None:
    """Why a graph compiled here and now would be left alone, or None."""
    reason = off_for_good()
    if reason is None and is_off_in_code():
        return "switched off by dash_inductor.disable()" if _here.get() is None else "inside dash_inductor.disabled()"
    return reason


def off_for_good() -> str | None:
    """Why nothing can switch dash_inductor on in this process, or None."""
    return "DASH_INDUCTOR=0 is set" if _state.off_by_environment() else _state.failure


def is_off_in_code() -> bool:
    """Whether code has switched dash_inductor off, here and now; every call of an eager program asks."""
    here = _here.get()
    return not (_on if here is None else here)
