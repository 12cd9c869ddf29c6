"""Switches dash_inductor on and off in code.  Uses the standard library only.

The switch is read when a graph is compiled; graphs that are compiled already do not change.
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
    """Switches dash_inductor on (the initial state) for graphs compiled from now on.

    With DASH_INDUCTOR=0 this has no effect, and warns.
    """
    global _on
    _on = True
    if _state.off_by_environment():
        warnings.warn("dash_inductor.enable() has no effect: DASH_INDUCTOR=0 is set", RuntimeWarning, stacklevel=2)


def disable() -> None:
    """Switches dash_inductor off for graphs compiled from now on: same graphs and cache keys as in plain PyTorch."""
    global _on
    _on = False


def is_enabled() -> bool:
    """Whether a graph that is compiled now, on this thread, with deterministic algorithms uses dash_inductor."""
    return off_reason() is None


@contextmanager
def disabled() -> Iterator[None]:
    """A context manager that switches dash_inductor off inside its block, for this thread or task."""
    with override(False):
        yield


@contextmanager
def override(value: bool) -> Iterator[None]:
    """A context manager that switches dash_inductor on or off for this thread or task.

    It overrides `enable` and `disable`.
    """
    token = _here.set(value)
    try:
        yield
    finally:
        _here.reset(token)


def off_reason() -> str | None:
    """Why dash_inductor is off for graphs compiled now, on this thread, in words; None if it is on."""
    reason = off_for_good()
    if reason is None and is_off_in_code():
        return "switched off by dash_inductor.disable()" if _here.get() is None else "inside dash_inductor.disabled()"
    return reason


def off_for_good() -> str | None:
    """Why dash_inductor cannot be switched on in this process, in words; None if it can."""
    return "DASH_INDUCTOR=0 is set" if _state.off_by_environment() else _state.failure


def is_off_in_code() -> bool:
    """Whether code, and not the environment, has switched dash_inductor off for this thread or task.

    Every eager attention call checks this.
    """
    here = _here.get()
    return not (_on if here is None else here)
