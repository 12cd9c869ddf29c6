"""Checks of the arguments of public functions.

Raises, everywhere here:
    ArgumentError: the value is not what the argument may be.
"""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ArgumentError


def path(name: str, value: object) -> Path:
    """The path that an argument gives."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(name, value, "a path, as a text or an os.PathLike of one")
    return Path(text)


def whole(name: str, value: object, least: int, most: int) -> None:
    """Check a whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ArgumentError(name, value, f"a whole number from {least} to {most}")


def truth(name: str, value: object) -> None:
    """Check a truth value."""
    if not isinstance(value, bool):
        raise ArgumentError(name, value, (True, False))
