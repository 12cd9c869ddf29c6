"""Where the threads of this process are: names of functions and line numbers, without values of variables."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from types import FrameType

from ..upstream.frames import PHASES

_LIBRARIES = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LENGTH = 200


def place() -> str:
    """The innermost line of the program's own code in the main thread, and the library function that it calls.

    Returns:
        Text such as ``next, called by main (a.py:40)``; "" if the thread has no Python frames.
    """
    frames = list(_frames(sys._current_frames().get(threading.main_thread().ident or 0)))
    own = next((number for number, frame in enumerate(frames) if not _is_library(frame)), len(frames) - 1)
    if not frames:
        return ""
    text = _named(frames[own])
    if own:
        text = f"{_name(frames[own - 1])}, called by {text}"
    return text[:_LENGTH]


def phase() -> str:
    """The known phase that any thread is in, "compile" or "checkpoint"; "" if there is none."""
    for top in sys._current_frames().values():
        for frame in _frames(top):
            name = frame.f_code.co_filename
            for end, found in PHASES.items():
                if name.endswith(end):
                    return found
    return ""


def _frames(top: FrameType | None) -> Iterator[FrameType]:
    while top is not None:
        yield top
        top = top.f_back


def _is_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith((*_LIBRARIES, _OURS, "<frozen")) or "site-packages" in name


def _name(frame: FrameType) -> str:
    return str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name))


def _named(frame: FrameType) -> str:
    return f"{_name(frame)} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
