"""A judge makes findings out of messages.  It is pure: the time is an argument, and it touches nothing outside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..report.coverage import Coverage
from ..report.findings import Finding
from ..transport.messages import Message


@dataclass
class Job:
    """What is known of the training run.

    Attributes:
        world: ranks.
        hosts, gpus: of ranks, as far as they have told.
        orders: what judges want of ranks, (ranks, message), until the monitor has sent it.
        coverage: of all ranks, and what judges could not compare.
    """

    world: int
    hosts: dict[int, str] = field(default_factory=dict)
    gpus: dict[int, str] = field(default_factory=dict)
    orders: list[tuple[tuple[int, ...], Message]] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)


class Judge:
    """One judge in the monitor.

    Attributes:
        kinds: of the messages that it takes.
    """

    kinds: frozenset[str] = frozenset()

    def __init__(self, job: Job, **settings: Any) -> None:
        self.job = job

    def take(self, message: Message, now: float) -> None:
        """A message has come.

        Args:
            now: seconds, of a clock that never goes back.
        """

    def heed(self, finding: Finding, now: float) -> None:
        """Any judge has found something."""

    def judge(self, now: float) -> list[Finding]:
        """What is new since the last call."""
        return []

    def finish(self, now: float) -> list[Finding]:
        """What is new, when no message will come any more."""
        return self.judge(now)
