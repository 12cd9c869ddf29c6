"""The files of one rank as one recording: a restarted process goes on in a new segment, from where training resumed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .file import Entry
from .recording import Recording


class Segments:
    """Reads the files of a rank in order; what a later one has again, the earlier ones do not count for.

    Attributes:
        paths: the files; path: the last of them.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._parts = [Recording(path) for path in paths]
        self.paths, self.path = paths, paths[-1]

    @property
    def facts(self) -> dict[str, Any]:
        """What the files said, up to where `steps` has read; later ones replace what earlier ones said."""
        return {name: value for part in self._parts for name, value in part.facts.items()}

    @property
    def findings(self) -> list[dict[str, Any]]:
        """The first findings of every file."""
        return [finding for part in self._parts for finding in part.findings]

    @property
    def findings_count(self) -> int:
        """All findings."""
        return sum(part.findings_count for part in self._parts)

    @property
    def unseen(self) -> dict[str, str]:
        """Tensors without fingerprints and why."""
        return {name: why for part in self._parts for name, why in part.unseen.items()}

    @property
    def ended(self) -> bool:
        """Whether the last process has closed its recording; known after the last step."""
        return self._parts[-1].ended

    @property
    def torn(self) -> int | None:
        """The byte of the last file at which a torn or damaged frame begins, None without one."""
        return self._parts[-1].torn

    def begin(self) -> None:
        """Read the facts at the beginning of every file.

        Raises:
            RecordingError: as for `Recording.steps`.
        """
        for part in self._parts:
            part.begin()

    def steps(self) -> Iterator[tuple[int, list[Entry]]]:
        """The steps of all files, ascending; holds one step of each file.

        Raises:
            RecordingError: as for `Recording.steps`.
        """
        streams = [part.steps() for part in self._parts]
        firsts = [next(stream, None) for stream in streams]
        for number, (first, stream) in enumerate(zip(firsts, streams, strict=True)):
            later = min((step[0] for step in firsts[number + 1 :] if step is not None), default=None)
            for step in itertools.chain([] if first is None else [first], stream):
                if later is None or step[0] < later:
                    yield step
