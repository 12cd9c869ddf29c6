"""The checks of a guard, in the order in which they get events."""

from __future__ import annotations

from .check import Check
from .data import Data
from .doors import Doors
from .facts import Facts
from .replay import Replay
from .replayed_update import ReplayedUpdate
from .replicas import Replicas
from .rest import Rest
from .roll_call import RollCall
from .times import Times
from .wires import Wires

BITS: tuple[type[Check], ...] = (Rest, Doors, Wires, Replicas)
"""State at rest is looked at before anything else of a step."""

CHECKS: tuple[type[Check], ...] = (Facts, Times, Data, *BITS, ReplayedUpdate, Replay, RollCall)
"""`checks.stop.Stop` stands behind all of them, where a verdict is to end training."""
