"""The checks of bits of one rank, and their judges, together."""

from __future__ import annotations

from .check import Check, Host
from .checks.doors import Doors
from .checks.replicas import Replicas
from .checks.rest import Rest
from .judge import Job, Judge
from .judges import doors, learned, replicas, rest
from .state import State


def checks(rank: Host, every: int = 1, at_rest: int = 1, at_doors: int = 1) -> list[Check]:
    """The checks of bits.

    Args:
        rank: whose they are.
        every: compare replicas in every so-manieth step; 0: never.
        at_rest: compare state at rest behind every so-manieth step; 0: never.
        at_doors: compare gathered parameters with shards in every so-manieth step; 0: never.
    """
    state, found = State(rank), list[Check]()
    if at_rest:
        found.append(Rest(rank, state, at_rest))
    if at_doors:
        found.append(Doors(rank, state, at_doors))
    if every:
        found.append(Replicas(rank, state, every))
    return found


def judges(job: Job) -> list[Judge]:
    """Their judges; those that break ties come first."""
    beside = [rest.Rest(job), doors.Doors(job)]
    return [*beside, learned.Learned(job), replicas.Replicas(job, beside)]
