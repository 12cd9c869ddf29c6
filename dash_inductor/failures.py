"""Handles unexpected errors of dash_inductor: the program goes on as with plain PyTorch, and the error is recorded.

The code that catches such an error leaves the graph as it was.  The log line of the record is the warning, see
`records.publication`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import _dash_inductor_state as _state

from .errors import described

log = logging.getLogger("dash_inductor")

recorders: list[Callable[[str, str], None]] = []
"""Functions called with (activity, error text) for errors that the caller does not record; `install` adds one."""


def is_strict() -> bool:
    """Whether unexpected errors of dash_inductor are raised instead of recorded."""
    from .config import config  # raises if a variable is invalid, which the doctor reports

    return config.strict or _state.strict_by_environment()


def caught(what: str, error: Exception, *, recorded: bool = False) -> str:
    """Records an unexpected error while it is being handled, and returns it as text.

    The traceback is logged at level DEBUG.

    Args:
        what: the activity that failed, in words.
        error: the error.
        recorded: whether the caller records it.

    Raises:
        Exception: the error itself, if `strict` is set.
    """
    if is_strict():
        raise error
    text = described(error)
    log.debug("an unexpected error in %s", what, exc_info=error)
    if not recorded:
        try:
            for record in recorders:
                record(what, text)
        except Exception as another:
            log.warning("an unexpected error in %s: %s; please report it", what, text, exc_info=another)
    return text
