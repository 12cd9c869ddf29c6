"""Reads the file of one rank from its beginning.

A file ends when its process ends, in whatever way.  Everything before a torn or damaged frame is read; nothing after it
is guessed at.  A frame that is whole but is not what a recorder writes is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dash_inductor.observers import phases
from dash_inductor.untrusted import Refused

from . import schema
from .file import ENTRY, STEP, Entry, Name
from .frames import Frames
from .limits import FACTS, FINDINGS, IN_STEP, NAMES

_LOSS = Name(phases.LOSS, "", "")


class Recording:
    """Reads the file of one rank from its beginning, holding one step at a time; it can be read once.

    Attributes:
        path: the file.
        facts: the contents of the "environment" and "facts" frames that `steps` has read up to now.
        findings: the contents of the first 100 "finding" frames up to now.
        findings_count: the number of all "finding" frames up to now.
        unseen: the reasons why tensors have no fingerprints, by tensor name, up to now.
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
        self._state: dict[str, Entry] = {}
        self._loss: float | None = None  # of the step that is being read

    @property
    def torn(self) -> int | None:
        return self._frames.torn

    def begin(self) -> None:
        """Read the facts in the first frame, if the process lived long enough to write it.

        Raises:
            RecordingError: see `steps`.
        """
        for content in self._frames:
            found = self._object(content) if content[:1] == b"J" else {}
            if found.pop("type", None) != "environment":
                raise self._frames.error("no environment in the first frame", "a rank, how many there are, and facts")
            self.facts.update(found)
            return

    def steps(self) -> Iterator[tuple[int, list[Entry]]]:
        """Yields the recorded steps in order, as (number, entries), with the entries in the order of observation.

        The state comes first, with all values, also those that have not changed; then the loss, if the step has one.

        Raises:
            RecordingError: the file cannot be read, or no recorder of this version has written it; see `limits` for
                what a file may contain.
        """
        if not self.facts:
            self.begin()
        step, numbers, entries = 0, list[int](), list[Entry]()
        for content in self._frames:
            if self.ended:
                raise self._frames.error("a frame after the end of the recording", "none")
            state: dict[str, Any] = {}
            loss = None
            if content[:1] == b"J":
                found = self._object(content)
                if found["type"] not in ("state", "loss"):
                    self._take(found)
                    continue
                next_, body, state, loss = found["step"], memoryview(b""), found.get("values", {}), found.get("value")
            else:
                next_, body = self._step(content)
            if next_ < max(step, 1):
                raise self._frames.error(f"step {next_} after step {step}", "steps from 1 on, in ascending order")
            if next_ != step:
                if step:
                    yield step, self._whole(step, numbers, entries)
                step, numbers, entries = next_, [], []
            self._change(state)
            if loss is not None:
                self._loss = (self._loss or 0.0) + float(loss)
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
            raise self._frames.error("bytes after the end of the recording", "none")
        if step:
            yield step, self._whole(step, numbers, entries)

    def _whole(self, step: int, numbers: list[int], entries: list[Entry]) -> list[Entry]:
        if len(set(numbers)) < len(numbers):
            ((number, times),) = Counter(numbers).most_common(1)
            if times > IN_STEP:
                raise self._frames.error(
                    f"{self._names[number]} {times} times in step {step}", f"each name {IN_STEP} times at most"
                )
        loss, self._loss = self._loss, None
        return [*self._state.values(), *([] if loss is None else [Entry(_LOSS, b"", loss)]), *entries]

    def _change(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self._state[name] = Entry(Name(phases.STATE, name, ""), b"", value)
        if len(self._state) > FACTS:
            raise self._frames.error(f"more than {FACTS} values of state", f"{FACTS} at most")

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
            raise self._frames.error(str(error), "what dash_guard.record writes") from error

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
