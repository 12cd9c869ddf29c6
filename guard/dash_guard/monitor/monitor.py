"""The monitor: gives messages to judges, and writes and prints what they find."""

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

from ..detectors.judge import Job, Judge
from ..report.findings import Finding, FindingsFile
from ..transport import connect
from ..transport.channel import Mailbox

log = logging.getLogger("dash_guard")

T = TypeVar("T")

_NAMED = 64  # ranks whose hosts and GPUs stand in a finding


def in_own_process() -> None:
    """Make this a process that does nothing else than to watch; call it before torch is imported.

    The guard must not watch the monitor, so its variables go, and torch loads no extensions.  Python looks for circles
    of objects seldom: messages and findings make none, and a look at the states of 10 000 ranks takes longer than a
    judgement.
    """
    gc.set_threshold(200_000, 50, 100)
    for name in (connect.FOLDER, connect.ADDRESS):
        os.environ.pop(name, None)
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


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
        self._mailbox, self._judges, self._tell, self._wall = mailbox, list(judges), tell, wall
        self._file = None if folder is None else FindingsFile(folder)

    @property
    def judges(self) -> tuple[Judge, ...]:
        """The judges that are on."""
        return tuple(self._judges)

    def turn(self, now: float) -> list[Finding]:
        """Take what has come and judge it; call it some times a second.

        Args:
            now: seconds, of a clock that never goes back.
        """
        self._take(now)
        return self._publish(self._all("judge", now), now)

    def finish(self, now: float) -> list[Finding]:
        """The last turn."""
        self._take(now)
        told = self._publish(self._all("finish", now), now)
        return told + self._publish(self._all("judge", now), now)  # what judges make of what others have found

    def _all(self, method: str, now: float) -> list[Finding]:
        calls = [(judge, functools.partial(getattr(judge, method), now)) for judge in self._judges]
        return [finding for judge, call in calls for finding in self._safely(judge, call) or ()]

    def _safely(self, judge: Judge, call: Callable[[], T]) -> T | None:
        """A judge that raises is switched off, and the others go on."""
        try:
            return call()
        except Exception as error:
            self._judges = [each for each in self._judges if each is not judge]
            why = f"the judge is off: {described(error)}"
            self.coverage.unseen(type(judge).__name__, why)
            log.warning("the judge %s of the guard is off: %s", type(judge).__name__, described(error))
            return None

    def _take(self, now: float) -> None:
        for message in self._mailbox.receive():
            if message.kind == "coverage":
                self.coverage.add(message.body)
            for judge in self._judges:
                if message.kind in judge.kinds:
                    self._safely(judge, functools.partial(judge.take, message, now))
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
            for judge in self._judges:
                self._safely(judge, functools.partial(judge.heed, finding, now))
            if self._file is not None:
                try:
                    self._file.add(finding)
                except OSError as error:
                    self.coverage.unseen("findings.jsonl", f"not written: {error}")
                    log.warning("the guard cannot write %s: %s", self._file.path, error)
                    self._file = None
        return published
