"""Refuses what cannot be undone while a call runs again: writing files, starting processes, and opening connections."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..upstream.compilers import COMPILERS

_REFUSED = {
    "os.mkdir": "makes a folder", "os.remove": "removes a file", "os.rename": "renames a file",
    "os.rmdir": "removes a folder", "os.system": "starts a process", "subprocess.Popen": "starts a process",
    "socket.connect": "opens a connection",
}  # fmt: skip


class SideEffect(RuntimeError):
    """Raised in a call that runs again, where it would write a file, start a process or open a connection."""


_here = threading.local()


@contextmanager
def no_side_effects() -> Iterator[None]:
    """A context manager in which this thread raises `SideEffect` before a side effect that cannot be undone.

    Writes to files that are open already are not seen.
    """
    _install()
    before = getattr(_here, "refuses", False)
    _here.refuses = True
    try:
        yield
    finally:
        _here.refuses = before


@functools.cache
def _install() -> None:
    sys.addaudithook(_audit)  # cannot be removed; outside of `no_side_effects` it does nothing


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not getattr(_here, "refuses", False):
        return
    what = _REFUSED.get(event, "")
    if event == "open" and _writes(arguments):
        what = f"writes the file {arguments[0]}"
    if what and not _compiles(sys._getframe(1)):
        raise SideEffect(f"its forward {what}")


def _writes(arguments: tuple[Any, ...]) -> bool:
    """Whether the arguments of the event "open" (path, mode, flags) are those of a file that is written."""
    _, mode, flags = arguments
    if isinstance(mode, str) and any(letter in mode for letter in "wax+"):
        return True
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND))


def _compiles(frame: FrameType | None) -> bool:
    """Whether a frame belongs to a compiler, or one that called it since the guard ran the call again."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith((*COMPILERS, "dash_guard.")):
            return not name.startswith("dash_guard.")
        frame = frame.f_back
    return False
