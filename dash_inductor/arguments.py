"""Checks of the arguments of public functions: each function takes the argument's name and its value.

Raises, in all functions here:
    ArgumentError: the value is not allowed for this argument.
"""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ArgumentError


def path(name: str, value: object) -> Path:
    """Returns the value of an argument as a path; the value must be a nonempty string or an `os.PathLike`."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(name, value, "a path, as a text or an os.PathLike of one")
    return Path(text)


def whole(name: str, value: object, least: int, most: int) -> None:
    """Checks that an argument is an integer from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ArgumentError(name, value, f"a whole number from {least} to {most}")


def truth(name: str, value: object) -> None:
    """Checks that an argument is a bool."""
    if not isinstance(value, bool):
        raise ArgumentError(name, value, (True, False))
