"""Unexpected errors of our own: a program compiles and runs as with plain PyTorch, and one warning says what to report.

Whoever catches such an error leaves the graph as it was, and leaves a record with the reason `internal_error`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import _dash_inductor_state as _state

from .config import config
from .errors import described

log = logging.getLogger("dash_inductor")

_REPORT = (
    "dash_inductor has met an unexpected error in %s, and leaves to plain PyTorch what it was doing: %s. This is a defect "
    "of dash_inductor, and this warning is the only one of the process. Please report it with its traceback, the output "
    "of `dash-inductor doctor` and, if you may share it, the folder that DASH_INDUCTOR_DUMP=<folder> writes. "
    "DASH_INDUCTOR_STRICT=1 raises the error instead."
)


recorders: list[Callable[[str, str], None]] = []
"""Called with what was being done and with the error, where nobody else leaves a record: `install` has one."""


class _Warned:
    """Whether this process has been warned."""

    yet = False


def is_strict() -> bool:
    """Whether errors are raised instead."""
    return config.strict or _state.strict_by_environment()


def warn(what: str, about: str, error: Exception | None = None) -> None:
    """Warn, for the first time in this process; later errors are logged at level DEBUG.

    Args:
        what: what was being done, in words.
        about: the error, in words.
        error: the error itself, for its traceback; None where it is gone.
    """
    level = logging.DEBUG if _Warned.yet else logging.WARNING
    _Warned.yet = True
    log.log(level, _REPORT, what, about, exc_info=error)


def caught(what: str, error: Exception, *, recorded: bool = False) -> str:
    """Take note of an unexpected error while it is being handled; return it in words.

    Args:
        what: what was being done, in words.
        recorded: whether the caller leaves a record of it.

    Raises:
        Exception: the error itself, if `strict` is set.
    """
    if is_strict():
        raise error
    text = described(error)
    warn(what, text, error)
    for record in () if recorded else recorders:
        try:
            record(what, text)
        except Exception as another:
            log.debug("an error without a record: %s", text, exc_info=another)
    return text
