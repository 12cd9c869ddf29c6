"""What a frame of a thread shows: the program's own code, or files of PyTorch that compile or handle a checkpoint."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Sequence
from types import FrameType

from dash_inductor import errors
from dash_inductor.installed import is_installed

_LIBRARIES = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
_OURS = tuple(
    os.path.join(os.path.dirname(os.path.abspath(file)), "") for file in (os.path.dirname(__file__), errors.__file__)
)


def is_library(frame: FrameType) -> bool:
    """Whether a frame is in an installed package, in Python's own library or in the guard: not in the program."""
    name = frame.f_code.co_filename
    return name.startswith((*_LIBRARIES, *_OURS, "<frozen")) or is_installed(name)


def is_own(frame: FrameType) -> bool:
    """Whether a frame is in the guard."""
    return frame.f_code.co_filename.startswith(_OURS)


def is_wrapper(frame: FrameType) -> bool:
    """Whether a frame is that of a function that passes any arguments on to one that it encloses, as decorators do."""
    code = frame.f_code
    takes_any = code.co_argcount + code.co_kwonlyargcount == 0 and bool(code.co_flags & inspect.CO_VARARGS)
    return takes_any and bool(code.co_freevars)


def program_frames(frames: Sequence[FrameType]) -> list[FrameType]:
    """Those frames that are in the program's own code; all of them if there are none.

    These are the frames below the folder of the script, or below the working directory, without wrappers of functions,
    such as those of a profiler. Only if there are none, wrappers and other code that is no library count.
    """
    found = [frame for frame in frames if not is_library(frame)]
    roots = _roots()
    below = [frame for frame in found if frame.f_code.co_filename.startswith(roots)]
    return [frame for frame in below if not is_wrapper(frame)] or below or found or list(frames)


@functools.cache
def _roots() -> tuple[str, ...]:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [os.getcwd(), *([os.path.dirname(os.path.abspath(script))] if script else [])]
    return tuple(os.path.join(folder, "") for folder in folders if folder != os.sep)


MODULE_CALLS = "torch/nn/modules/module.py"
"""The end of the name of the file whose functions call the forwards of modules."""

PHASES = {
    "torch/_dynamo/convert_frame.py": "compile",
    "torch/_inductor/compile_fx.py": "compile",
    "torch/_inductor/async_compile.py": "compile",
    "torch/serialization.py": "checkpoint",
    "torch/distributed/checkpoint/state_dict_saver.py": "checkpoint",
    "torch/distributed/checkpoint/state_dict_loader.py": "checkpoint",
}
"""Ends of file names, and what a program does that has a frame there."""
