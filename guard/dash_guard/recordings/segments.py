"""The files of one rank as one recording.

A restarted process continues in a new file, a segment, from the step at which training resumed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .file import Entry
from .recording import Recording


class Segments:
    """Reads the files of a rank in order; a step that a later file repeats is ignored in the earlier ones.

    Attributes:
        paths: the files, in order.
        path: the last of them.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._parts = [Recording(path) for path in paths]
        self.paths, self.path = paths, paths[-1]

    @property
    def facts(self) -> dict[str, Any]:
        """The facts in all files, up to where `steps` has read; those of later files replace those of earlier ones."""
        return {name: value for part in self._parts for name, value in part.facts.items()}

    @property
    def findings(self) -> list[dict[str, Any]]:
        """The first findings in every file, at most 100 of each."""
        return [finding for part in self._parts for finding in part.findings]

    @property
    def findings_count(self) -> int:
        """The number of all findings in the files."""
        return sum(part.findings_count for part in self._parts)

    @property
    def unseen(self) -> dict[str, str]:
        """The reason why a tensor has no fingerprints, by the name of the tensor."""
        return {name: why for part in self._parts for name, why in part.unseen.items()}

    @property
    def ended(self) -> bool:
        """Whether the last process has closed its recording; known after the last step."""
        return self._parts[-1].ended

    @property
    def torn(self) -> int | None:
        """The byte at which a torn or damaged frame begins in the last file, None without one."""
        return self._parts[-1].torn

    def begin(self) -> None:
        """Read the facts at the beginning of every file.

        Raises:
            RecordingError: see `Recording.steps`.
        """
        for part in self._parts:
            part.begin()

    def steps(self) -> Iterator[tuple[int, list[Entry]]]:
        """Yields the steps of all files as (number, entries), in ascending order; holds one step of each file.

        Raises:
            RecordingError: see `Recording.steps`.
        """
        streams = [part.steps() for part in self._parts]
        firsts = [next(stream, None) for stream in streams]
        for number, (first, stream) in enumerate(zip(firsts, streams, strict=True)):
            later = min((step[0] for step in firsts[number + 1 :] if step is not None), default=None)
            for step in itertools.chain([] if first is None else [first], stream):
                if later is None or step[0] < later:
                    yield step
