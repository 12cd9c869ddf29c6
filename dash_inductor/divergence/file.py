"""The file of one rank: an append-only sequence of frames, of which any prefix can be read.

    header   MAGIC
    frame    u32 length, u32 CRC-32 of the content, content (`length` bytes); little endian
    content  a letter, then: J  a JSON object with a "type" (see `writer`)
                             S  u32 step, u32 n, then n times: u32 number of the name, 16 bytes of fingerprint

Every frame is handed to the operating system by one write, so that whatever ends the process leaves whole frames and
at most one torn one, at which the reader stops.  Names are numbered from 0 in the order in which "names" lists them.
A step may be spread over several frames that follow one another.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ArgumentError, DashError
from .sizes import DIGEST

MAGIC = b"dash_inductor recording 1\n"
_HEAD, _STEP, _ENTRY = struct.Struct("<II"), struct.Struct("<II"), struct.Struct(f"<I{DIGEST}s")


class RecordingError(DashError, RuntimeError):
    """A recording cannot be written or read."""


class Name(NamedTuple):
    """What a fingerprint is of.

    phase: one of `phases.PHASES`; tensor: for example ``layers.0.mlp.weight``; description: its dtype and shape.
    """

    phase: str
    tensor: str
    description: str

    def __str__(self) -> str:
        return f"{self.phase} {self.tensor}"


class Entry(NamedTuple):
    """A fingerprint and what it is of."""

    name: Name
    fingerprint: bytes

    def __str__(self) -> str:
        return f"{self.name.description} {self.fingerprint.hex()}"


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank:05}.dash"


def ranks_in(folder: Path) -> list[int]:
    """The ranks that have left a file in a folder.

    Raises:
        ArgumentError: there is none.
    """
    found = sorted(int(path.stem.removeprefix("rank")) for path in folder.glob("rank*.dash"))
    if not found:
        raise ArgumentError("folder", str(folder), "a folder with a recording, which has a file rank00000.dash")
    return found


class Appender:
    """Writes frames.  The file must not exist: recordings are never overwritten."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            raise RecordingError(f"{path} exists already: record into another folder, or remove this one") from None
        self._write(MAGIC)

    def json(self, content: dict[str, Any]) -> None:
        self._frame(b"J" + json.dumps(content, separators=(",", ":")).encode())

    def step(self, step: int, entries: list[tuple[int, bytes]]) -> None:
        self._frame(b"S" + _STEP.pack(step, len(entries)) + b"".join(_ENTRY.pack(*entry) for entry in entries))

    def close(self) -> None:
        os.close(self._file)

    def _frame(self, content: bytes) -> None:
        self._write(_HEAD.pack(len(content), zlib.crc32(content)) + content)

    def _write(self, data: bytes) -> None:
        written = os.write(self._file, data)
        if written != len(data):
            raise RecordingError(f"only {written} of {len(data)} bytes of a frame were written: is the disk full?")


@dataclass
class Recording:
    """Reads the file of one rank from its beginning, holding one step at a time.

    Attributes:
        facts: what the "environment" and "facts" frames said, up to where `steps` has read.
        findings: the "finding" frames, up to there.
        unseen: tensors without fingerprints and why, up to there.
        ended: whether the recording was closed; known after the last step.
        torn: the byte at which a torn or damaged frame begins, None without one; known after the last step.
    """

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)
    unseen: dict[str, str] = field(default_factory=dict)
    ended: bool = False
    torn: int | None = None

    def steps(self) -> Iterator[tuple[int, list[Entry]]]:
        """The steps that were recorded, in order, with their entries in the order of observation."""
        names: list[Name] = []
        step, entries = None, list[Entry]()
        for content in self._frames():
            if content[:1] == b"J":
                self._take(json.loads(content[1:]), names)
                continue
            number, count = _STEP.unpack_from(content, 1)
            if step not in (None, number):
                yield step, entries
                entries = []
            step = number
            body = memoryview(content)[1 + _STEP.size :]
            entries += [Entry(names[name], value) for name, value in _ENTRY.iter_unpack(body)]
            assert len(body) == count * _ENTRY.size
        if step is not None:
            yield step, entries

    def _take(self, content: dict[str, Any], names: list[Name]) -> None:
        kind = content.pop("type")
        if kind == "names":
            names.extend(Name(*name) for name in content["names"])
        elif kind in ("environment", "facts"):
            self.facts.update(content)
        elif kind == "finding":
            self.findings.append(content)
        elif kind == "unseen":
            self.unseen[content["name"]] = content["reason"]
        elif kind == "end":
            self.ended = True

    def _frames(self) -> Iterator[bytes]:
        with open(self.path, "rb") as file:
            magic = file.read(len(MAGIC))
            if not MAGIC.startswith(magic):
                raise RecordingError(f"{self.path} is no recording of this version of dash_inductor")
            while True:
                start = file.tell() if len(magic) == len(MAGIC) else 0
                head = file.read(_HEAD.size)
                if not head and len(magic) == len(MAGIC):
                    return
                length, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, None)
                rest = os.fstat(file.fileno()).st_size - file.tell()
                content = file.read(length) if 0 < length <= rest else b""
                if not content or zlib.crc32(content) != checksum:
                    self.torn = start
                    return
                yield content
