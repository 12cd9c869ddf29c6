"""The file of one rank: an append-only sequence of frames, of which any prefix can be read.

    header   MAGIC
    frame    u32 length, u32 CRC-32 of the content, content (`length` bytes); little endian
    content  a letter, then: J  a JSON object with a "type" (see `schema`)
                             S  u32 step, u32 n, then n times: u32 number of the name, 16 bytes of fingerprint

Version 1 had no frames of type "state", and version 2 none of type "loss"; both are still read.

Every frame is handed to the operating system by one write, so that whatever ends the process leaves whole frames and
at most one torn one, at which the reader stops.  Names are numbered from 0 in the order in which "names" lists them.
A step may be spread over several frames that follow one another.  The limits of a file are in `limits`.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from dash_inductor.untrusted import Refused

from ..errors import RecordingError
from ..fingerprints.sizes import DIGEST
from . import schema
from .limits import FRAME, SEGMENTS

MAGIC = b"dash_inductor recording 3\n"
READ = (MAGIC, b"dash_inductor recording 2\n", b"dash_inductor recording 1\n")
"""The versions that are read."""

HEAD, STEP, ENTRY = struct.Struct("<II"), struct.Struct("<II"), struct.Struct(f"<I{DIGEST}s")


class Name(NamedTuple):
    """The name of a fingerprint.

    Attributes:
        phase: one of `phases.PHASES`.
        tensor: the name of the tensor, for example ``layers.0.mlp.weight``.
        description: its dtype and shape.
    """

    phase: str
    tensor: str
    description: str

    def __str__(self) -> str:
        return f"{self.phase} {self.tensor}"


class Entry(NamedTuple):
    """A fingerprint, 16 bytes, with the name of its tensor; in `STATE` and `LOSS`, a value and no fingerprint."""

    name: Name
    fingerprint: bytes
    value: Any = None

    def __str__(self) -> str:
        return f"{self.name.description} {self.fingerprint.hex()}"


def path_of(folder: Path, rank: int, segment: int = 0) -> Path:
    """The path of the file of a rank.

    Each process that continues the training of a rank after a restart writes a segment of its own.
    """
    return folder / f"rank{rank:05}{f'.{segment}' if segment else ''}.dash"


class Appender:
    """Creates a recording file and appends frames to it; refuses content that a reader would reject.

    Args:
        path: the file; its folder is created if needed.

    Raises:
        FileExistsError: the file already exists; recordings are never overwritten.
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
        self._write(MAGIC)

    @classmethod
    def next_of(cls, folder: Path, rank: int) -> Appender:
        """Creates a file for a rank's next segment: the first segment number that has no file yet.

        Raises:
            RecordingError: the rank has the largest number of segments already.
        """
        for segment in range(SEGMENTS):
            with contextlib.suppress(FileExistsError):
                return cls(path_of(folder, rank, segment))
        raise RecordingError(folder, f"rank {rank} has {SEGMENTS} files already", "another folder")

    def json(self, content: dict[str, Any]) -> None:
        encoded = json.dumps(content, separators=(",", ":")).encode()
        try:
            schema.read(encoded)
        except Refused as error:
            raise RecordingError(self.path, f"not written: {error}", "what can be read again") from error
        self._frame(b"J" + encoded)

    def step(self, step: int, entries: list[tuple[int, bytes]]) -> None:
        self._frame(b"S" + STEP.pack(step, len(entries)) + b"".join(ENTRY.pack(*entry) for entry in entries))

    def close(self) -> None:
        os.close(self._file)

    def _frame(self, content: bytes) -> None:
        if len(content) > FRAME:
            raise RecordingError(self.path, f"not written: a frame of {len(content)} bytes", f"{FRAME} at most")
        self._write(HEAD.pack(len(content), zlib.crc32(content)) + content)

    def _write(self, data: bytes) -> None:
        written = os.write(self._file, data)
        if written != len(data):
            found = f"only {written} of {len(data)} bytes of a frame were written"
            raise RecordingError(self.path, found, "all of them: is the disk full?")
