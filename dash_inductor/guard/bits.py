"""The checks of bits of a rank, and their judges."""

from __future__ import annotations

from .check import Check
from .checks.doors import Doors
from .checks.replicas import Replicas
from .checks.rest import Rest
from .judge import Judge
from .judges import doors, learned, replicas, rest

CHECKS: tuple[type[Check], ...] = (Rest, Doors, Replicas)
"""In the order in which they get events: state at rest is looked at before anything else of a step."""

JUDGES: tuple[type[Judge], ...] = (rest.Rest, doors.Doors, learned.Learned, replicas.Replicas)
