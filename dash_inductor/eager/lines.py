"""Finds the source line of the program that calls an operator."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, __file__))


def line_of_program() -> str:
    """The ``file:line`` of the innermost Python frame outside of libraries; "" on an autograd thread."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(("<", *_LIBRARIES)):
        frame = frame.f_back  # type: ignore[assignment]  # None behind the outermost
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
