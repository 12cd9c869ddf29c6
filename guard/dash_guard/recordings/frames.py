"""Reads the frames of a recording file, in blocks, and checks them before anything is built from them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from dash_inductor.untrusted import Refused, open_regular

from ..errors import RecordingError
from .file import HEAD, MAGIC, READ
from .limits import FILE, FRAME

_BLOCK = 1 << 16


class Frames:
    """An iterator over the contents of the frames of a file, up to a torn or damaged one; it can be used once.

    The file is opened anew for every block.  So a comparison has one file open, however many ranks there are.

    Attributes:
        start: the byte at which the frame that was read last begins.
        torn: the byte at which a torn or damaged frame begins, None without one; known at the end.
    """

    torn: int | None = None

    def __init__(self, path: Path) -> None:
        self.path, self.start = path, 0
        self._block, self._used, self._end = b"", 0, 0  # what was read, how much of it was taken, where in the file
        self._size, self._file = 0, (0, 0)
        self._contents = self._read()

    def __iter__(self) -> Iterator[bytes]:
        """Yields the content of each frame, as bytes without length and checksum.

        Raises:
            RecordingError: the file cannot be read, is no recording of this version, or has a frame that is too long.
        """
        return self._contents

    def error(self, found: str, allowed: str) -> RecordingError:
        """Returns an error whose text names the byte at which the last frame begins.

        Args:
            found: what is wrong.
            allowed: what is expected.
        """
        return RecordingError(self.path, f"{found}, at byte {self.start}", allowed)

    def _read(self) -> Iterator[bytes]:
        magic = self._take(len(MAGIC))
        if not any(each.startswith(magic) for each in READ):
            found = "this is no recording that this version of dash_guard reads"
            raise RecordingError(self.path, found, " or ".join(map(repr, READ)))
        if len(magic) < len(MAGIC):
            self.torn = 0
            return
        while True:
            self.start = self._end - len(self._block) + self._used
            head = self._take(HEAD.size)
            if not head:
                return
            length, checksum = HEAD.unpack(head) if len(head) == HEAD.size else (0, 0)
            if length > FRAME and self.start + HEAD.size + length <= self._size:
                raise self.error(f"a frame of {length} bytes", f"{FRAME} at most")
            content = self._take(length) if length <= FRAME else b""
            if not content or len(content) < length or zlib.crc32(content) != checksum:
                self.torn = self.start
                return
            yield content

    def _take(self, count: int) -> bytes:
        """The next `count` bytes, fewer at the end of the file."""
        if len(self._block) - self._used < count:
            self._block = self._block[self._used :] + self._more(max(count, _BLOCK))
            self._used = 0
        taken = self._block[self._used : self._used + count]
        self._used += len(taken)
        return taken

    def _more(self, count: int) -> bytes:
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                which = status.st_dev, status.st_ino
                if self._end and which != self._file:
                    raise Refused("another file has taken its place meanwhile")
                if status.st_size > FILE:
                    raise Refused(f"a file of {status.st_size} bytes, where {FILE} are allowed")
                self._size, self._file = status.st_size, which
                content = os.pread(file.fileno(), count, self._end)
        except Refused as error:
            raise RecordingError(self.path, str(error), "a file that dash_guard.record has written") from error
        except OSError as error:
            raise RecordingError(self.path, f"it cannot be read: {error.strerror}", "a file that can be") from error
        self._end += len(content)
        return content
