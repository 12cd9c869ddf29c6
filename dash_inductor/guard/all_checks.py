"""All checks of a rank, in the order in which they get events."""

from __future__ import annotations

from . import bits
from .check import Check
from .checks.replay import Replay
from .checks.roll_call import RollCall

CHECKS: tuple[type[Check], ...] = (
    *bits.CHECKS,
    Replay,
    RollCall,
)
"""`checks.stop.Stop` stands behind all of them, where a verdict is to end training."""
