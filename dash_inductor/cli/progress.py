"""A progress bar that also moves while nothing is reported: a compile is silent for long."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

INTERVAL = 10.0
"""Seconds after which a line says that the work goes on, where the stream is no terminal."""


class Progress:
    """A bar on the standard error, from `with` to the end of its block.

    On a terminal it is one line, which shows how long the present part takes and is erased at the end.  Elsewhere every
    part gets a line, and another one every 10 seconds.

    Args:
        parts: number of calls of `done` until all is done.
        stream: by default the standard error.
    """

    def __init__(self, parts: int, stream: TextIO | None = None) -> None:
        self._parts, self._done, self._text = parts, 0, ""
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._since = self._shown = time.monotonic()
        self._lock, self._end = threading.Lock(), threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Progress:
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._ticker.join()
        if self._live:
            self._write("\r\033[K")

    def say(self, text: str) -> None:
        """Say what is being done now."""
        with self._lock:
            self._text, self._since = text, time.monotonic()
            self._show()

    def begin(self, text: str) -> None:
        """Say what is being done now: the next part.  The one before, if there is one, is done."""
        if self._text:
            self.done()
        self.say(text)

    def done(self, parts: int = 1) -> None:
        """Count so many more parts as done."""
        with self._lock:
            self._done += parts
            if self._live:
                self._show()

    def _tick(self) -> None:
        while not self._end.wait(0.2 if self._live else 1.0):
            with self._lock:
                if self._live or time.monotonic() - self._shown >= INTERVAL:
                    self._show()

    def _show(self) -> None:
        now = time.monotonic()
        self._shown = now
        filled = 20 * min(self._done, self._parts) // max(self._parts, 1)
        seconds = f"  {now - self._since:.0f} s" if now - self._since >= 1 else ""
        line = f"[{'#' * filled}{'.' * (20 - filled)}] {self._text}{seconds}"
        if self._live:
            self._write(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}")
        else:
            self._write(f"{line}\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(ValueError, OSError):  # the stream was closed: nobody looks at the bar
            self._stream.write(text)
            self._stream.flush()
