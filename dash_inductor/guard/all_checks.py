"""The checks of a guard, in the order in which they get events."""

from __future__ import annotations

from .check import Check
from .checks.data import Data
from .checks.doors import Doors
from .checks.facts import Facts
from .checks.replay import Replay
from .checks.replayed_update import ReplayedUpdate
from .checks.replicas import Replicas
from .checks.rest import Rest
from .checks.roll_call import RollCall
from .checks.times import Times
from .checks.wires import Wires

BITS: tuple[type[Check], ...] = (Rest, Doors, Wires, Replicas)
"""State at rest is looked at before anything else of a step."""

CHECKS: tuple[type[Check], ...] = (Facts, Times, Data, *BITS, ReplayedUpdate, Replay, RollCall)
"""`checks.stop.Stop` stands behind all of them, where a verdict is to end training."""
