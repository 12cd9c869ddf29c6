"""Where the threads of this process are: names of functions and line numbers, without values of variables."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from ..upstream.frames import MODULE_CALLS, PHASES, is_own, program_frames

_LENGTH = 200


def place() -> str:
    """The innermost line of the program's own code in the main thread, and the library function that it calls.

    Returns:
        Text such as ``next, called by main (a.py:40)``; "" if the thread has no Python frames.
    """
    frames = list(_frames(sys._current_frames().get(threading.main_thread().ident or 0)))
    if not frames:
        return ""
    own = frames.index(program_frames(frames)[0])
    text = named(frames[own])
    if own and not is_own(frames[own - 1]):
        text = f"{_name(frames[own - 1])}, called by {text}"
    return text[:_LENGTH]


def frames_of(thread: int) -> list[FrameType]:
    """The frames of a thread in the program's own code, the outermost first; all frames if there are none of these.

    Args:
        thread: the identifier of the thread (`threading.get_ident`).
    """
    return program_frames(list(_frames(sys._current_frames().get(thread)))[::-1])


def outside_of_modules(frames: list[FrameType]) -> list[FrameType]:
    """The frames outside of all modules: those before the first forward of a module.

    The result has all frames if there is no such forward, or if the outermost frame is one.

    Args:
        frames: the frames of a thread, the outermost first; the result has the same order.
    """
    first = next((number for number, frame in enumerate(frames) if _is_forward(frame)), len(frames))
    return frames[:first] or frames


def _is_forward(frame: FrameType) -> bool:
    caller = frame.f_back
    return caller is not None and caller.f_code.co_filename.endswith(MODULE_CALLS)


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


def _name(frame: FrameType) -> str:
    return str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name))


def named(frame: FrameType) -> str:
    """The function and the line of a frame: ``evaluate (train.py:91)``."""
    return f"{_name(frame)} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
