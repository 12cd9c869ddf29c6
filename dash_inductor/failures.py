"""Unexpected errors of our own: programs run as with plain PyTorch, and a record and a warning tell of the error.

Whoever catches such an error leaves the graph as it was.  The log line of a record is the warning, see
`records.publication`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import _dash_inductor_state as _state

from .errors import described

log = logging.getLogger("dash_inductor")

recorders: list[Callable[[str, str], None]] = []
"""Called with what was being done and with the error, where nobody else leaves a record: `install` has one."""


def is_strict() -> bool:
    """Whether errors are raised instead."""
    from .config import config  # raises where a variable has a bad value, which the doctor wants to tell

    return config.strict or _state.strict_by_environment()


def caught(what: str, error: Exception, *, recorded: bool = False) -> str:
    """Take note of an unexpected error while it is being handled; return it in words.

    The log has its traceback at level DEBUG.

    Args:
        what: what was being done, in words.
        recorded: whether the caller leaves a record of it.

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
