"""The monitor: passes messages to detectors, and writes and prints their findings."""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dash_inductor.errors import described

from ..detectors.detector import Detector, Job
from ..report.findings import Finding, FindingsFile
from ..transport import connect
from ..transport.channel import Mailbox

log = logging.getLogger("dash_guard")

T = TypeVar("T")

_NAMED = 64  # ranks whose hosts and GPUs a finding contains


def in_own_process() -> None:
    """Prepare a process that only watches; call this before torch is imported.

    The guard must not watch the monitor, so its environment variables are deleted, and torch loads no extensions.
    Garbage collection runs seldom: messages and findings form no cycles, and a collection of the states of 10 000 ranks
    takes longer than all detectors.
    """
    gc.set_threshold(200_000, 50, 100)
    for name in (connect.FOLDER, connect.ADDRESS):
        os.environ.pop(name, None)
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


class Monitor:
    """The monitor of a training run, without a clock or network of its own.

    Args:
        job: what is known about the run.
        mailbox: receives messages and sends requests.
        detectors: each gets the messages of its kinds.
        folder: the folder of ``findings.jsonl``; None keeps findings in memory only.
        tell: is called once with every finding, to print it.
        wall: returns seconds since the epoch.

    Attributes:
        coverage: the coverage of the job.
        findings: all findings up to now.
    """

    def __init__(
        self,
        job: Job,
        mailbox: Mailbox,
        detectors: Sequence[Detector],
        folder: Path | None,
        tell: Callable[[Finding], None],
        wall: Callable[[], float],
    ) -> None:
        self.job, self.coverage, self.findings = job, job.coverage, list[Finding]()
        self._mailbox, self._detectors, self._tell, self._wall = mailbox, list(detectors), tell, wall
        self._file = None if folder is None else FindingsFile(folder)

    @property
    def detectors(self) -> tuple[Detector, ...]:
        """The detectors that have not been switched off."""
        return tuple(self._detectors)

    def turn(self, now: float) -> list[Finding]:
        """Take new messages and run the detectors; call this a few times per second.

        Args:
            now: seconds of a monotonic clock.

        Returns:
            New findings.
        """
        self._take(now)
        return self._publish(self._all("detect", now), now)

    def finish(self, now: float) -> list[Finding]:
        """Take the last messages and run the detectors for the last time; returns the new findings."""
        self._take(now)
        published = self._publish(self._all("finish", now), now)
        return published + self._publish(self._all("detect", now), now)  # those that depend on others

    def _all(self, method: str, now: float) -> list[Finding]:
        calls = [(detector, functools.partial(getattr(detector, method), now)) for detector in self._detectors]
        return [finding for detector, call in calls for finding in self._safely(detector, call) or ()]

    def _safely(self, detector: Detector, call: Callable[[], T]) -> T | None:
        """Call a detector; one that raises is switched off, and the others go on."""
        try:
            return call()
        except Exception as error:
            self._detectors = [each for each in self._detectors if each is not detector]
            why = f"the detector is off: {described(error)}"
            self.coverage.unseen(type(detector).__name__, why)
            log.warning("the detector %s of the guard is off: %s", type(detector).__name__, described(error))
            return None

    def _take(self, now: float) -> None:
        for message in self._mailbox.receive():
            if message.kind == "coverage":
                self.coverage.add(message.body)
            for detector in self._detectors:
                if message.kind in detector.kinds:
                    self._safely(detector, functools.partial(detector.take, message, now))
        for ranks, message in self.job.orders:
            self._mailbox.order(ranks, message)
        self.job.orders.clear()

    def _publish(self, found: list[Finding], now: float) -> list[Finding]:
        published = []
        for finding in found:
            finding = replace(
                finding,
                time=finding.time or self._wall(),
                hosts=finding.hosts or tuple(self.job.hosts.get(rank, "") for rank in finding.ranks[:_NAMED]),
                gpus=finding.gpus or tuple(self.job.gpus.get(rank, "") for rank in finding.ranks[:_NAMED]),
            )
            self.findings.append(finding)
            published.append(finding)
            self._tell(finding)
            for detector in self._detectors:
                self._safely(detector, functools.partial(detector.observe, finding, now))
            if self._file is not None:
                try:
                    self._file.add(finding)
                except OSError as error:
                    self.coverage.unseen("findings.jsonl", f"not written: {error}")
                    log.warning("the guard cannot write %s: %s", self._file.path, error)
                    self._file = None
        return published
