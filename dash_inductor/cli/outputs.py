"""The files that a command writes in addition to its output on stdout, and the width of that output."""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

from ..errors import ArgumentError, DashError

_FULL = os.makedev(1, 7)
"""The device ``/dev/full``, which can be opened but not written."""


def check(name: str, path: Path | None) -> None:
    """Raises ArgumentError if no file can be written at a path, before the work that produces the file; None passes."""
    if path is None:
        return
    try:
        if path.exists():
            _check_existing(path)
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        allowed = f"a file that can be written, in a folder that exists ({error.strerror})"
        raise ArgumentError(name, str(path), allowed) from error


def _check_existing(path: Path) -> None:
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)  # waits for no reader of a FIFO
    try:
        _check_space(opened)
    finally:
        os.close(opened)


def check_folder(name: str, folder: Path | None) -> None:
    """Raises ArgumentError if a folder cannot be made or written, before the work that fills it; None passes."""
    if folder is None:
        return
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        allowed = f"a folder that can be written, and is made if it is not there ({error.strerror})"
        raise ArgumentError(name, str(folder), allowed) from error


def check_stdout() -> None:
    """Raises OSError if nothing can be written to the standard output of the process."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # something else stands for it
        return
    _check_space(output)


def escape_unprintable() -> None:
    """Lets the standard output have escapes for what its encoding lacks, such as µ in ASCII."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _check_space(opened: int) -> None:
    if os.fstat(opened).st_rdev == _FULL:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def columns() -> int:
    """The width of the text that a command prints: that of the terminal, from 60 to 160; 100 if stdout is none."""
    if not sys.stdout.isatty():
        return 100
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 160)


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
        raise DashError(f"{path} cannot be written: {error.strerror}") from error
