"""Schedules of the deterministic attention backward: who computes what and when, and the order of adding dq tiles.

Needs only the standard library and sympy.  Names are loaded on first use, so importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .codegen import python_functions, triton_source
    from .jobs import Column, Job, Problem, resident, tables
    from .planner import plan
    from .problem import Band, Plan, Site, Tiles
    from .schedules import NAMES, PARTS, Schedule, schedule, supports
    from .simulator import Costs, Run, simulate
    from .validity import check

_HOME = {
    "codegen": ("python_functions", "triton_source"),
    "jobs": ("Column", "Job", "Problem", "resident", "tables"),
    "planner": ("plan",),
    "problem": ("Band", "Plan", "Site", "Tiles"),
    "schedules": ("NAMES", "PARTS", "Schedule", "schedule", "supports"),
    "simulator": ("Costs", "Run", "simulate"),
    "validity": ("check",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "NAMES",
    "PARTS",
    "Band",
    "Column",
    "Costs",
    "Job",
    "Plan",
    "Problem",
    "Run",
    "Schedule",
    "Site",
    "Tiles",
    "check",
    "plan",
    "python_functions",
    "resident",
    "schedule",
    "simulate",
    "supports",
    "tables",
    "triton_source",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE[name]}", __name__), name)
    globals()[name] = value
    return value
