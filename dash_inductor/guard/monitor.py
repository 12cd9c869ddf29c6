"""The monitor: gives messages to judges, and writes and prints what they find."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from .channel import Mailbox
from .findings import Finding, FindingsFile
from .judge import Job, Judge

log = logging.getLogger("dash_inductor")


class Monitor:
    """One for a training run.

    Args:
        job: what is known of the run.
        mailbox: where messages come from.
        judges: who get the messages of their kinds.
        folder: where ``findings.jsonl`` goes; None keeps findings in memory only.
        tell: gets every finding once, for people.
        wall: gives seconds since the epoch.
    """

    def __init__(
        self,
        job: Job,
        mailbox: Mailbox,
        judges: Sequence[Judge],
        folder: Path | None,
        tell: Callable[[Finding], None],
        wall: Callable[[], float],
    ) -> None:
        self.job, self.coverage, self.findings = job, job.coverage, list[Finding]()
        self._mailbox, self._judges, self._tell, self._wall = mailbox, judges, tell, wall
        self._file = None if folder is None else FindingsFile(folder)

    def turn(self, now: float) -> list[Finding]:
        """Take what has come and judge it; call it some times a second.

        Args:
            now: seconds, of a clock that never goes back.
        """
        self._take(now)
        return self._publish([finding for judge in self._judges for finding in judge.judge(now)], now)

    def finish(self, now: float) -> list[Finding]:
        """The last turn."""
        self._take(now)
        told = self._publish([finding for judge in self._judges for finding in judge.finish(now)], now)
        return told + self._publish([finding for judge in self._judges for finding in judge.judge(now)], now)

    def _take(self, now: float) -> None:
        for message in self._mailbox.receive():
            if message.kind == "coverage":
                self.coverage.add(message.body)
            for judge in self._judges:
                if message.kind in judge.kinds:
                    judge.take(message, now)
        for ranks, message in self.job.orders:
            self._mailbox.order(ranks, message)
        self.job.orders.clear()

    def _publish(self, found: list[Finding], now: float) -> list[Finding]:
        published = []
        for finding in found:
            finding = replace(
                finding,
                time=finding.time or self._wall(),
                hosts=finding.hosts or tuple(self.job.hosts.get(rank, "") for rank in finding.ranks),
                gpus=finding.gpus or tuple(self.job.gpus.get(rank, "") for rank in finding.ranks),
            )
            self.findings.append(finding)
            published.append(finding)
            self._tell(finding)
            for judge in self._judges:
                judge.heed(finding, now)
            if self._file is not None:
                try:
                    self._file.add(finding)
                except OSError as error:
                    self.coverage.unseen("findings.jsonl", f"not written: {error}")
                    log.warning("the guard cannot write %s: %s", self._file.path, error)
                    self._file = None
        return published
