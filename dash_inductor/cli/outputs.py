"""Files that a command writes beside what it prints."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ArgumentError, DashError


def check(name: str, path: Path | None) -> None:
    """Raise ArgumentError unless a file can be written there: ask before the work whose result it gets."""
    if path is None:
        return
    parent = path.parent
    if path.is_dir() or not parent.is_dir() or not os.access(path if path.exists() else parent, os.W_OK):
        raise ArgumentError(name, str(path), "a file that can be written, in a folder that exists")


def write(path: Path | None, text: str) -> None:
    """Write a page, if one is asked for.

    Raises:
        DashError: it cannot be written.
    """
    if path is None:
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DashError(f"{path} cannot be written: {error}") from error
