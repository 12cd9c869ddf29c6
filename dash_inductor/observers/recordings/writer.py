"""The thread that waits for the device and writes the file, so that training does neither."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .file import Appender

Job = Callable[[Appender], None]

_QUEUED = 64  # jobs that may wait; then training waits for the disk, instead of filling the memory


class Writer:
    """Does jobs one after the other, on a thread of its own.

    Args:
        path: the file, which must not exist.
        environment: the facts that the file begins with, as `schema` has them.

    Raises:
        RecordingError: the file exists.
    """

    def __init__(self, path: Path, environment: dict[str, Any]) -> None:
        self._appender = Appender(path)
        self._appender.json({"type": "environment", **environment})
        self._jobs: queue.Queue[Job | None] = queue.Queue(_QUEUED)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="dash_inductor recording", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Do a job later.

        Raises:
            Exception: what an earlier job raised, once; nothing is written any more after it.
        """
        self.check()
        self._jobs.put(job)

    def check(self) -> None:
        """Raise what a job raised, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Finish all jobs, and end the recording.

        Raises:
            Exception: what a job raised, unless `put` or `check` has.
        """
        self._jobs.put(None)
        self._thread.join()
        self.check()

    def _work(self) -> None:
        failed = False
        while (job := self._jobs.get()) is not None:
            if failed:
                continue  # whoever puts jobs must not wait for room
            try:
                job(self._appender)
            except Exception as error:
                self._error, failed = error, True
        if not failed:
            self._appender.json({"type": "end"})
        self._appender.close()
