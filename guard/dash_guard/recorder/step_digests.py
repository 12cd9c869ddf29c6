"""Digests of whole steps for a log: one number for each phase, equal in two runs if all fingerprints of it are."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

from dash_inductor.errors import described
from dash_inductor.observers.log import Log

from ..recordings.file import Name

log = logging.getLogger("dash_guard")

BYTES = 6
"""Bytes of a digest: whole numbers below 2^48 are exact in the double precision of loggers."""


class StepDigests:
    """Logs a digest for each phase of a step: ``digest/gradient``, ``digest/parameter``, ``digest/activation``, ...

    A digest is BLAKE2b of the names, dtypes, shapes and fingerprints of all tensors of the phase, sorted by name.  An
    error of the logger becomes one warning, after which nothing is logged.

    Args:
        to: the log.
    """

    def __init__(self, to: Log) -> None:
        self._to: Log | None = to
        self._step = 0
        self._found: dict[str, list[tuple[Name, bytes]]] = {}

    def add(self, step: int, entries: Sequence[tuple[Name, bytes]]) -> None:
        """Adds fingerprints of a step, which come in one or several parts; the first of a step ends the one before."""
        if step != self._step:
            self.end()
            self._step = step
        for name, value in entries:
            self._found.setdefault(name.phase, []).append((name, value))

    def end(self) -> None:
        """Logs the step of which fingerprints were added."""
        found, self._found = self._found, {}
        if not found or self._to is None:
            return
        try:
            self._to.values(self._step, {f"digest/{phase}": float(number(each)) for phase, each in found.items()})
        except Exception as error:
            self._to = None
            log.warning("digests are not logged from step %d on: %s", self._step, described(error))


def number(entries: Sequence[tuple[Name, bytes]]) -> int:
    """The digest of fingerprints with their names, as a number of `BYTES` bytes."""
    hashed = hashlib.blake2b(digest_size=BYTES)
    for name, value in sorted(entries):
        hashed.update("\0".join((*name, "")).encode() + value)
    return int.from_bytes(hashed.digest(), "little")
