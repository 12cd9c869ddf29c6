"""Checks and writes the files that a command produces in addition to its output on stdout."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ArgumentError, DashError


def check(name: str, path: Path | None) -> None:
    """Raises ArgumentError if no file can be written at a path, before the work that produces the file; None passes."""
    if path is None:
        return
    parent = path.parent
    if path.is_dir() or not parent.is_dir() or not os.access(path if path.exists() else parent, os.W_OK):
        raise ArgumentError(name, str(path), "a file that can be written, in a folder that exists")


def check_folder(name: str, folder: Path) -> None:
    """Raises ArgumentError if a folder cannot be made or written to, before the work whose results it gets."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ArgumentError(name, str(folder), "a folder that can be written, or that can be made")


def write(path: Path | None, text: str) -> None:
    """Writes a text file at a path; does nothing if the path is None.

    Raises:
        DashError: the file cannot be written.
    """
    if path is None:
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DashError(f"{path} cannot be written: {error}") from error
