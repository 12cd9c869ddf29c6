"""Passes the findings of a folder to a log while training goes on."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from dash_inductor.errors import described
from dash_inductor.observers.log import Log

from ..report import findings

log = logging.getLogger("dash_guard")

_INTERVAL = 1.0  # seconds


class Alerts:
    """A thread that looks for new findings every second; an error becomes one warning, and ends it.

    Args:
        folder: the folder of the findings; those that it has already are not passed on.
        to: the log.
    """

    def __init__(self, folder: Path, to: Log) -> None:
        self._folder, self._to = folder, to
        self._seen = len(findings.read(folder))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="dash_guard alerts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Passes on what has been found until now, and ends."""
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            ended = False
            while not ended:
                ended = self._ended.wait(_INTERVAL)
                found = findings.read(self._folder)
                for finding in found[self._seen :]:
                    step = "" if finding.step is None else f" (step {finding.step})"
                    self._to.alert(f"{finding.kind}: {finding.severity}", f"{finding.sentence}{step}. {finding.advice}")
                self._seen = len(found)
        except Exception as error:
            log.warning("findings are not logged any more: %s", described(error))
