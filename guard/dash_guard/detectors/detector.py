"""The base class of all detectors.

A detector turns messages into findings, without side effects: the time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..report.coverage import Coverage
from ..report.findings import Finding
from ..transport.messages import Message


@dataclass
class Job:
    """What the monitor knows about the training run.

    Attributes:
        world: the number of ranks.
        hosts, gpus: the names of hosts and GPUs by rank, for ranks that have reported them.
        orders: requests from detectors to ranks, (ranks, message), until the monitor has sent them.
        coverage: the coverage of all ranks, with what detectors could not compare.
        explanations: by rank, phrases that say what else than its machine may make it compute something else.
    """

    world: int
    hosts: dict[int, str] = field(default_factory=dict)
    gpus: dict[int, str] = field(default_factory=dict)
    orders: list[tuple[tuple[int, ...], Message]] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    explanations: dict[int, dict[str, None]] = field(default_factory=dict)

    def explain(self, rank: int, phrase: str) -> None:
        """Add what may make a rank compute something else, such as ``its settings.mkldnn differs``."""
        self.explanations.setdefault(rank, {})[phrase] = None


class Detector:
    """The base class of a detector of the monitor.

    Attributes:
        kinds: the kinds of messages that the monitor passes to it.
    """

    kinds: frozenset[str] = frozenset()

    def __init__(self, job: Job, **settings: Any) -> None:
        self.job = job

    def take(self, message: Message, now: float) -> None:
        """Take a message of one of `kinds`.

        Args:
            message: the message.
            now: seconds of a monotonic clock.
        """

    def observe(self, finding: Finding, now: float) -> None:
        """Receive a finding of any detector, including its own."""

    def detect(self, now: float) -> list[Finding]:
        """Return the findings that are new since the last call.

        Args:
            now: seconds of a monotonic clock.
        """
        return []

    def finish(self, now: float) -> list[Finding]:
        """Return the last findings at the end of the run; no more messages will arrive."""
        return self.detect(now)
