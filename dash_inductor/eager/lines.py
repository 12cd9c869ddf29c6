"""The line of a program that calls an operator, looked up in the frames of Python."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, __file__))


def line_of_program() -> str:
    """``file:line`` of the program that calls; "" on a thread of autograd."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(("<", *_LIBRARIES)):
        frame = frame.f_back  # type: ignore[assignment]  # None behind the outermost
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
