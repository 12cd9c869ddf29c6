"""Frames of a connection between a rank and the monitor: a length, a code that proves who has written it, a message.

The code (a keyed BLAKE2b) covers the direction and the place of the frame on its connection, and its key is made of the
secret of the job and of random bytes of both ends: a frame that was recorded elsewhere, left out or moved is refused.
Messages are not secret: they hold digests, times and names.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from .._untrusted import Refused
from ..errors import ArgumentError
from .messages import SIZE

SECRET, SECRET_FILE = "DASH_INDUCTOR_GUARD_SECRET", "DASH_INDUCTOR_GUARD_SECRET_FILE"
"""Variables with the secret of the job, or with a file of mode 0600 that has it."""

NONCE = 16
"""Random bytes that each end begins a connection with."""
FIRST = 4096
"""Bytes of the first message of a rank at most, before it is known who it is."""

_CODE = 16
_SHORTEST = 16  # characters of a secret


def new_secret() -> str:
    """A secret for a job."""
    return secrets.token_hex(32)


def secret_of(environment: Mapping[str, str]) -> str | None:
    """The secret that a process has inherited, None without one.

    Raises:
        ArgumentError: it is too short, or everybody can read its file.
    """
    secret, path = environment.get(SECRET), environment.get(SECRET_FILE)
    if secret is None and path is not None:
        secret = _read(Path(path))
    if secret is not None and len(secret) < _SHORTEST:
        raise ArgumentError(SECRET, f"a text of {len(secret)} characters", f"{_SHORTEST} characters or more")
    return secret


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o077:
                raise ArgumentError(SECRET_FILE, str(path), "a regular file that only its owner can read (mode 0600)")
            return file.read(FIRST).decode().strip()
    except (OSError, UnicodeError) as error:
        raise ArgumentError(SECRET_FILE, str(path), f"a file with a secret ({error})") from error


def connection_key(secret: str, server: bytes, client: bytes) -> bytes:
    """The key of one connection, made of the secret and of what both ends have begun with."""
    key = hashlib.blake2b(secret.encode(), digest_size=32).digest()
    return hashlib.blake2b(server + client, key=key, digest_size=32).digest()


class Writer:
    """Makes frames of one direction of a connection."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._key, self._direction, self._count = key, direction, 0

    def frame(self, content: bytes) -> bytes:
        """The bytes to send."""
        code = _code(self._key, self._direction, self._count, content)
        self._count += 1
        return len(content).to_bytes(4, "big") + code + content


class Reader:
    """Takes frames of one direction of a connection out of its bytes.

    Attributes:
        most: bytes of a message that are allowed next.
    """

    def __init__(self, key: bytes, direction: bytes, most: int = SIZE) -> None:
        self._key, self._direction, self._count = key, direction, 0
        self._pending = bytearray()
        self.most = most

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The messages that are complete now; no more is kept than one message may have, and one read.

        Raises:
            Refused: a length or a code is wrong: the connection is of no use any more.
        """
        self._pending += received
        while len(self._pending) >= 4:
            length = int.from_bytes(self._pending[:4], "big")
            if length > self.most:
                raise Refused(f"a message of {length} bytes, where {self.most} are allowed")
            end = 4 + _CODE + length
            if len(self._pending) < end:
                return
            code, content = bytes(self._pending[4 : 4 + _CODE]), bytes(self._pending[4 + _CODE : end])
            del self._pending[:end]
            if not hmac.compare_digest(code, _code(self._key, self._direction, self._count, content)):
                raise Refused("a message without the code of this job")
            self._count += 1
            yield content


def _code(key: bytes, direction: bytes, count: int, content: bytes) -> bytes:
    return hashlib.blake2b(direction + count.to_bytes(8, "big") + content, key=key, digest_size=_CODE).digest()
