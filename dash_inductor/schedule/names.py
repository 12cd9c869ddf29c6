"""The names of the schedules and the masks that they support; needs the standard library alone.

`schedules` defines the expressions and needs sympy, whose import takes longer than planning.
"""

from __future__ import annotations

from ..errors import ArgumentError
from ..model.mask import Band

UNBOUNDED = ("symmetric_shift", "bent_fold")
"""Schedules that require a band without an upper bound on i - j."""

NAMES = ("ascending", "descending", "shift", "bent_fold", "spt", "two_pass", "symmetric_shift")
PARTS = {name: 2 if name == "symmetric_shift" else 1 for name in NAMES}

CO_RESIDENT = ("shift", "symmetric_shift")
"""Schedules in which some CTA waits for a later work id: those with `schedules.Schedule.resident`."""


def check_name(name: str) -> None:
    """Raise ArgumentError unless `name` is one of `NAMES`."""
    if name not in NAMES:
        raise ArgumentError("schedule", name, NAMES)


def supports(name: str, band: Band) -> str | None:
    """Return why the schedule cannot run this mask; None if it can, for any lengths >= 1.

    Raises:
        ArgumentError: an unknown name.
    """
    check_name(name)
    if name == "shift" and not band.is_full:
        return "shift needs the full mask"
    if name in UNBOUNDED and band.hi is not None:
        return f"{name} needs a mask without upper bound on i - j"
    return None
