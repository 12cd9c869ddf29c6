"""The recordings of the ranks of a run.

A file ends with its process, however that ends.  What is before a torn or damaged frame is read, and what such a frame
hides is not guessed at.  A frame that is whole but is not what a recorder writes is an error.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..._untrusted import Refused
from ...errors import ArgumentError, RecordingError
from . import schema
from .file import ENTRY, STEP, Entry, Name, path_of
from .frames import Frames
from .limits import FINDINGS, IN_STEP, NAMES, RANKS


class Recording:
    """Reads the file of one rank from its beginning, holding one step at a time; it can be read once.

    Attributes:
        path: the file.
        facts: what the "environment" and "facts" frames said, up to where `steps` has read.
        findings: the first "finding" frames up to there, at most 100; findings_count: all of them.
        unseen: tensors without fingerprints and why, up to there.
        ended: whether the recording was closed; known after the last step.
        torn: the byte at which a torn or damaged frame begins, None without one; known after the last step.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        self.findings: list[dict[str, Any]] = []
        self.findings_count = 0
        self.unseen: dict[str, str] = {}
        self.ended = False
        self._frames = Frames(path)
        self._names: list[Name] = []
        self._known: set[Name] = set()
        self._texts: dict[str, str] = {}  # names share their parts

    @property
    def torn(self) -> int | None:
        return self._frames.torn

    def begin(self) -> None:
        """Read the facts that stand at the beginning, where the process lived long enough to write them.

        Raises:
            RecordingError: as for `steps`.
        """
        for content in self._frames:
            found = self._object(content) if content[:1] == b"J" else {}
            if found.pop("type", None) != "environment":
                raise self._frames.error("no environment in the first frame", "a rank, how many there are, and facts")
            self.facts.update(found)
            return

    def steps(self) -> Iterator[tuple[int, list[Entry]]]:
        """The steps that were recorded, in order, with their entries in the order of observation.

        Raises:
            RecordingError: the file cannot be read, or no recorder of this version has written it; see `limits` for
                what it may have.
        """
        if not self.facts:
            self.begin()
        step, numbers, entries = 0, list[int](), list[Entry]()
        for content in self._frames:
            if self.ended:
                raise self._frames.error("a frame behind the end of the recording", "none")
            if content[:1] == b"J":
                self._take(self._object(content))
                continue
            next_, body = self._step(content)
            if next_ < max(step, 1):
                raise self._frames.error(f"step {next_} behind step {step}", "steps from 1 on, in ascending order")
            if next_ != step:
                if step:
                    yield step, self._whole(step, numbers, entries)
                step, numbers, entries = next_, [], []
            count = len(numbers) + len(body) // ENTRY.size
            if count > IN_STEP * len(self._names):
                raise self._frames.error(
                    f"{count} fingerprints in step {step}", f"at most {IN_STEP} of each of {len(self._names)} names"
                )
            for number, value in ENTRY.iter_unpack(body):
                if number >= len(self._names):
                    raise self._frames.error(
                        f"name {number} in step {step}", f"one of the {len(self._names)} names before it"
                    )
                numbers.append(number)
                entries.append(Entry(self._names[number], value))
        if self.ended and self.torn is not None:
            raise self._frames.error("bytes behind the end of the recording", "none")
        if step:
            yield step, self._whole(step, numbers, entries)

    def _whole(self, step: int, numbers: list[int], entries: list[Entry]) -> list[Entry]:
        if len(set(numbers)) < len(numbers):
            ((number, times),) = Counter(numbers).most_common(1)
            if times > IN_STEP:
                raise self._frames.error(
                    f"{self._names[number]} {times} times in step {step}", f"each name {IN_STEP} times at most"
                )
        return entries

    def _step(self, content: bytes) -> tuple[int, memoryview]:
        """The number of a step, and its fingerprints in this frame."""
        if content[:1] != b"S":
            raise self._frames.error(f"a frame of kind {content[:1]!r}", "b'J' or b'S'")
        if len(content) < 1 + STEP.size:
            raise self._frames.error(f"a step in {len(content)} bytes", f"{1 + STEP.size} at least")
        step, count = STEP.unpack_from(content, 1)
        body = memoryview(content)[1 + STEP.size :]
        if len(body) != count * ENTRY.size:
            raise self._frames.error(
                f"{count} fingerprints of step {step} in {len(body)} bytes", f"{ENTRY.size} bytes for each"
            )
        return step, body

    def _object(self, content: bytes) -> dict[str, Any]:
        try:
            return schema.read(content[1:])
        except Refused as error:
            raise self._frames.error(str(error), "what dash_inductor.record writes") from error

    def _take(self, found: dict[str, Any]) -> None:
        kind = found.pop("type")
        if kind == "names":
            self._name(found["names"])
        elif kind == "facts":
            self.facts.update(found)
        elif kind == "finding":
            self._find(found)
        elif kind == "unseen":
            self.unseen[found["name"]] = found["reason"]
            self._count()
        elif kind == "end":
            self.ended = True
        else:
            raise self._frames.error("a second environment", "one, in the first frame")

    def _name(self, names: list[list[str]]) -> None:
        shared = self._texts.setdefault
        for phase, tensor, description in names:
            name = Name(shared(phase, phase), shared(tensor, tensor), shared(description, description))
            if name in self._known:
                raise self._frames.error(f"the name {name} ({description}) a second time", "each name once")
            self._known.add(name)
            self._names.append(name)
        self._count()

    def _count(self) -> None:
        if len(self._names) + len(self.unseen) > NAMES:
            raise self._frames.error(f"more than {NAMES} names", f"{NAMES} at most")

    def _find(self, found: dict[str, Any]) -> None:
        world = self.facts["world_size"]
        highest = max(rank for group in found["groups"] for rank in group)
        if highest >= world:
            raise self._frames.error(f"a finding about rank {highest} of {world}", f"ranks 0 to {world - 1}")
        self.findings_count += 1
        if len(self.findings) < FINDINGS:
            self.findings.append(found)


class Run:
    """The files of all ranks in a folder, each of them read as far as `Recording.begin` does.

    Attributes:
        recordings: by rank, in ascending order.
        world_size: how many ranks the run had; None if no file is long enough to say so.

    Raises:
        ArgumentError: the folder has no recording.
        RecordingError: a file has a name that is not of a rank, is of another rank or of another run, or is refused by
            `Recording.begin`.
    """

    def __init__(self, folder: Path) -> None:
        self.recordings = {rank: Recording(path_of(folder, rank)) for rank in _ranks_in(folder)}
        self.world_size: int | None = None
        for rank, recording in self.recordings.items():
            recording.begin()
            if recording.facts:
                self._agree(rank, recording)
        last = max(self.recordings)
        if self.world_size is not None and last >= self.world_size:
            raise RecordingError(path_of(folder, last), f"a file of rank {last}", f"ranks 0 to {self.world_size - 1}")

    def _agree(self, rank: int, recording: Recording) -> None:
        facts = recording.facts
        if facts["rank"] != rank:
            raise RecordingError(recording.path, f"a recording of rank {facts['rank']}", f"one of rank {rank}")
        if self.world_size not in (None, facts["world_size"]):
            raise RecordingError(
                recording.path,
                f"a recording of a run of {facts['world_size']} ranks",
                f"one of {self.world_size} ranks, as the files before it are",
            )
        self.world_size = facts["world_size"]

    def missing(self) -> list[range]:
        """The ranks that have no file, as far as it is known how many there were."""
        bounds = [-1, *self.recordings, self.world_size or 0]
        gaps = (range(before + 1, after) for before, after in itertools.pairwise(bounds))
        return [gap for gap in gaps if gap]


def _ranks_in(folder: Path) -> list[int]:
    """The ranks that have left a file in a folder, in ascending order."""
    ranks = []
    try:
        with os.scandir(folder) as found:
            for entry in found:
                if re.fullmatch(r"rank.*\.dash", entry.name, re.DOTALL):
                    ranks.append(_rank_of(folder, entry.name))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null character
        pass  # as if it were empty
    except OSError as error:
        raise RecordingError(folder, f"it cannot be read: {error.strerror}", "a folder with a recording") from error
    if not ranks:
        raise ArgumentError("folder", str(folder), "a folder with a recording, which has a file rank00000.dash")
    return sorted(ranks)


def _rank_of(folder: Path, name: str) -> int:
    digits = re.fullmatch(r"rank([0-9]{5,7})\.dash", name)
    rank = int(digits[1]) if digits else RANKS
    if rank >= RANKS or path_of(folder, rank).name != name:
        last = path_of(folder, RANKS - 1).name
        raise RecordingError(
            folder / name, "no name of the file of a rank", f"rank00000.dash to {last}, or other names"
        )
    return rank
