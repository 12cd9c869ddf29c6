"""The checks of a guard, in the order in which they get events."""

from __future__ import annotations

from . import bits
from .check import Check
from .checks.data import Data
from .checks.facts import Facts
from .checks.replay import Replay
from .checks.roll_call import RollCall
from .checks.times import Times

CHECKS: tuple[type[Check], ...] = (
    Facts,
    Times,
    Data,
    *bits.CHECKS,
    Replay,
    RollCall,
)
"""`checks.stop.Stop` stands behind all of them, where a verdict is to end training."""
