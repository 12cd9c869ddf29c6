"""Schedules of the deterministic attention backward: which CTA computes what, and the order of adding dq tiles.

Needs only the standard library and sympy.  Names are loaded on first use, so importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .codegen import python_functions, triton_source
    from .jobs import Column, Job, jobs_of, tables
    from .names import NAMES, PARTS, supports
    from .problem import Problem
    from .schedules import Schedule, define
    from .simulator import Costs, Run, simulate
    from .table_tile_schedule import Tables
    from .tile_schedule import ClosedForm, TileSchedule
    from .validity import check, check_tables

_HOME = {
    "codegen": ("python_functions", "triton_source"),
    "jobs": ("Column", "Job", "jobs_of", "tables"),
    "names": ("NAMES", "PARTS", "supports"),
    "problem": ("Problem",),
    "schedules": ("Schedule", "define"),
    "simulator": ("Costs", "Run", "simulate"),
    "table_tile_schedule": ("Tables",),
    "validity": ("check", "check_tables"),
    "tile_schedule": ("ClosedForm", "TileSchedule"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "NAMES",
    "PARTS",
    "ClosedForm",
    "Column",
    "Costs",
    "Job",
    "Problem",
    "Run",
    "Schedule",
    "Tables",
    "TileSchedule",
    "check",
    "check_tables",
    "define",
    "jobs_of",
    "python_functions",
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
