"""All checks of a rank, in the order in which they get events."""

from __future__ import annotations

from .check import Check
from .checks.data import Data
from .checks.facts import Facts
from .checks.times import Times

CHECKS: tuple[type[Check], ...] = (
    Facts,
    Times,
    Data,
)
