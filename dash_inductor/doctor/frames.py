"""Inspects the Python stack: the program's line, the compiled code around it, and the module whose forward runs."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from ..upstream.dynamo import eval_frame
from .libraries import Library, library_of

_LIBRARIES = tuple(str(Path(str(module.__file__)).parent) for module in (torch, sys.modules["dash_inductor"]))
_FLEX = str(Path(str(torch.nn.attention.__file__)).parent)
_HERE = str(Path(__file__).parent)
LOOKING = "looked_at"
"""The name of the doctor's functions that wrap those of PyTorch; frames are searched from there outwards."""


def frames() -> Iterator[types.FrameType]:
    """Yields the Python frames outwards from the program's call of a function that the doctor wraps.

    Frames of the doctor are left out.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != LOOKING:
        frame = frame.f_back
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_HERE):
            yield frame
        frame = frame.f_back


def arguments(module: nn.Module) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """The (args, kwargs) of a module call whose hooks now run, before hooks change them; None if they are not visible.

    Global module hooks, which call this function, do not get keyword arguments.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == nn.modules.module.__file__ and frame.f_code.co_name == "_call_impl":
            found = frame.f_locals
            if found.get("self") is module and "args" in found and "kwargs" in found:
                return found["args"], found["kwargs"]
        frame = frame.f_back
    return None


def called_by_pytorch() -> bool:
    """Whether PyTorch itself, not the program, called the wrapped function, for example to restore a setting."""
    return next(frames()).f_code.co_filename.startswith(_LIBRARIES)


def line() -> tuple[str, str]:
    """The ``file:line`` and source text of the innermost frame outside of PyTorch and of libraries with attention."""
    for frame in frames():
        file = frame.f_code.co_filename
        if not file.startswith(("<", *_LIBRARIES)) and _library(frame) is None:
            return f"{file}:{frame.f_lineno}", linecache.getline(file, frame.f_lineno).strip()
    return "an unknown line", ""


def in_a_layer() -> bool:
    """Whether a layer of another library that contains attention is running."""
    return any(library is not None and library.layers for library in map(_library, frames()))


def compiled_around() -> str:
    """Why a call runs in eager mode although a compiled function encloses it, in words; "" if none does."""
    for frame in frames():
        if frame.f_code.co_filename != eval_frame.__file__:
            continue
        outside = frame.f_back
        if outside is not None and outside.f_code.co_filename.startswith(_FLEX):
            continue  # FlexAttention in eager mode is a compiled function of PyTorch's own
        disabled = isinstance(frame.f_locals.get("self"), eval_frame.DisableContext)
        return ", inside torch._dynamo.disable" if disabled else ", behind a graph break of a compiled function"
    return ""


def modules() -> list[nn.Module]:
    """The modules whose forward is running, from the innermost outwards."""
    file = nn.modules.module.__file__
    of_calls = (frame for frame in frames() if frame.f_code.co_filename == file)
    found = [frame.f_locals["self"] for frame in of_calls if frame.f_code.co_name == "_call_impl"]
    return [module for module in found if not isinstance(module, eval_frame.OptimizedModule)]


def name_of(module: nn.Module, root: nn.Module) -> str:
    """The name of a module: the class of the outermost module `root`, then the path from there."""
    path = next((name for name, found in root.named_modules() if found is module), "")
    inside = f".{path} ({type(module).__name__})" if path else ""
    return type(root).__name__ + inside


def _library(frame: types.FrameType) -> Library | None:
    return library_of(str(frame.f_globals.get("__name__", "")))
