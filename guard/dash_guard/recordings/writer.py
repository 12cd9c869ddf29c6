"""The thread that waits for devices and writes a recording's file, so that training neither waits nor fails."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from .file import Appender

log = logging.getLogger("dash_guard")

_QUEUED = 64  # jobs that may wait; then training waits for the disk, instead of filling the memory


class File(Protocol):
    """The interface of a recording file that is being written."""

    def json(self, content: dict[str, Any]) -> None:
        """Write a JSON frame, see `schema`."""

    def step(self, step: int, entries: list[tuple[int, bytes]]) -> None:
        """Write fingerprints of a step, as (number of the tensor's name, 16 bytes)."""

    def close(self) -> None:
        """Close the file; nothing is written after that."""


class Nowhere:
    """A `File` that discards everything, in place of one that cannot be written; jobs still compare ranks."""

    def json(self, content: dict[str, Any]) -> None:
        """Discards the frame instead of writing it."""

    def step(self, step: int, entries: list[tuple[int, bytes]]) -> None:
        """Does nothing: the fingerprints of the step are discarded."""

    def close(self) -> None:
        """Does nothing, since no file is open."""


Job = Callable[[File], None]


class Writer:
    """Runs jobs, functions that write to the file of a rank, one after the other on a thread of its own.

    If the file cannot be written, there is one warning, and the recording of this rank ends; training goes on, and so
    do jobs that other ranks depend on.

    Args:
        folder: the folder of the file; if this rank has a file there, as after a restart, a new segment begins.
        rank: the rank of the file.
        environment: the facts at the beginning of the file, see `schema`.
    """

    def __init__(self, folder: Path, rank: int, environment: dict[str, Any]) -> None:
        self._rank = rank
        self._file: File = Nowhere()
        try:
            self._file = appender = Appender.next_of(folder, rank)
            if appender.path.stem != f"rank{rank:05}":
                log.warning("rank %d has a recording in %s: this one is %s", rank, folder, appender.path.name)
            appender.json({"type": "environment", **environment})
        except Exception as error:
            self._fail(error)
        self._jobs: queue.Queue[Job | None] = queue.Queue(_QUEUED)
        self._thread = threading.Thread(target=self._work, name="dash_inductor recording", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job; waits if too many jobs are waiting."""
        self._jobs.put(job)

    def leave(self, name: str, why: str) -> None:
        """End the file with a reason, so that `compare` reports it as cut off; later jobs still run, without a file.

        Args:
            name: what is missing from the recording.
            why: the reason.
        """

        def job(file: File) -> None:
            file.json({"type": "unseen", "name": name, "reason": why})
            file.close()
            self._file = Nowhere()

        self.put(job)

    def close(self) -> None:
        """Finish all jobs, mark the recording as complete, and close the file."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)
        self._do(lambda file: file.json({"type": "end"}))
        self._file.close()

    def _do(self, job: Job) -> None:
        try:
            job(self._file)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Stop writing; an open file ends here, and `compare` reports that it was cut off."""
        log.warning("the recording of rank %d ends here, and training goes on: %s", self._rank, error)
        file, self._file = self._file, Nowhere()
        try:
            file.close()
        except OSError as closing:
            log.warning("the file of rank %d could not be closed: %s", self._rank, closing)
