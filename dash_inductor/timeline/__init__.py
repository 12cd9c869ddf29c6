"""Timelines of simulated or recorded kernel runs, which say when each worker computes, waits and adds; and pictures.

A worker is a CTA, or an SM in a recorded run.  The package needs only the standard library and sympy; SVG and PNG
pictures need matplotlib.  Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .files import SUFFIXES, write
    from .lengths import Lengths
    from .model import Picture, Step, Timeline
    from .simulated import of_plan, timeline

_HOME = {
    "lengths": ("Lengths",),
    "files": ("SUFFIXES", "write"),
    "model": ("Picture", "Step", "Timeline"),
    "simulated": ("of_plan", "timeline"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["SUFFIXES", "Lengths", "Picture", "Step", "Timeline", "of_plan", "timeline", "write"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE[name]}", __name__), name)
    globals()[name] = value
    return value
