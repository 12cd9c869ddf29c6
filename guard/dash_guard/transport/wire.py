"""What proves that a message was written by a rank, or by the monitor, of this job: a code beside it, and its number.

The code (a keyed BLAKE2b) covers the direction and the number of the message, and its key is made of the secret of the
job and of random bytes of both ends: a message that was recorded elsewhere, changed or repeated is refused, and one
that was left out is missed.  Messages are not secret: they hold digests, times and names.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from dash_inductor.errors import ArgumentError
from dash_inductor.untrusted import Refused

SECRET, SECRET_FILE = "DASH_GUARD_SECRET", "DASH_GUARD_SECRET_FILE"
"""Variables with the secret of the job, or with a file of mode 0600 that has it."""

NONCE = 16
"""Random bytes of each end."""

_NUMBER, _CODE = 8, 16
_SHORTEST = 16  # characters of a secret
_LONGEST = 4096  # bytes of a file with one


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
            return file.read(_LONGEST).decode().strip()
    except (OSError, UnicodeError) as error:
        raise ArgumentError(SECRET_FILE, str(path), f"a file with a secret ({error})") from error


def session_key(secret: str, monitor: bytes, rank: bytes) -> bytes:
    """The key of the messages between two ends, made of the secret and of the random bytes of both."""
    key = hashlib.blake2b(secret.encode(), digest_size=32).digest()
    return hashlib.blake2b(monitor + rank, key=key, digest_size=32).digest()


def seal(key: bytes, direction: bytes, number: int, content: bytes) -> bytes:
    """A message with its number and its code."""
    return number.to_bytes(_NUMBER, "big") + _code(key, direction, number, content) + content


def unseal(key: bytes, direction: bytes, sealed: bytes) -> tuple[int, bytes]:
    """The number and the content of what `seal` has made.

    Raises:
        Refused: it has not made this.
    """
    number = int.from_bytes(sealed[:_NUMBER], "big")
    code, content = sealed[_NUMBER : _NUMBER + _CODE], sealed[_NUMBER + _CODE :]
    if not hmac.compare_digest(code, _code(key, direction, number, content)):
        raise Refused("a message without the code of this job")
    return number, content


def _code(key: bytes, direction: bytes, number: int, content: bytes) -> bytes:
    return hashlib.blake2b(direction + number.to_bytes(_NUMBER, "big") + content, key=key, digest_size=_CODE).digest()
