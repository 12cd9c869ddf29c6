"""Authenticates messages: a code and a number prove that each comes from a rank or from the monitor of this job.

The code (a keyed BLAKE2b) covers the direction and the number of the message. Its key is derived from the secret of the
job and from random bytes of both ends. So a message that was recorded elsewhere, changed or repeated is refused, and a
missing message is noticed. Messages are not encrypted: they contain digests, times and names.
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
"""Environment variables with the secret of the job, or with the path of a file of mode 0600 that contains it."""

NONCE = 16
"""The number of random bytes of each end."""

_NUMBER, _CODE = 8, 16
_SHORTEST = 16  # characters of a secret
_LONGEST = 4096  # bytes of a file with one


def new_secret() -> str:
    """Make a secret for a job: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def secret_of(environment: Mapping[str, str]) -> str | None:
    """The secret of the job in the environment of a process, or in the file that it names; None if there is none.

    Raises:
        ArgumentError: the secret is too short, or others can read its file.
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
    """The key for the messages between a rank and the monitor, 32 bytes.

    Args:
        secret: the secret of the job.
        monitor, rank: the random bytes of both ends.
    """
    key = hashlib.blake2b(secret.encode(), digest_size=32).digest()
    return hashlib.blake2b(monitor + rank, key=key, digest_size=32).digest()


def seal(key: bytes, direction: bytes, number: int, content: bytes) -> bytes:
    """The message with its number (8 bytes) and its authentication code (16 bytes) before it.

    Args:
        key: the session key.
        direction: to the monitor or to the rank, so that a message cannot be sent back.
        number: the number of the message in this direction.
        content: the message.
    """
    return number.to_bytes(_NUMBER, "big") + _code(key, direction, number, content) + content


def unseal(key: bytes, direction: bytes, sealed: bytes) -> tuple[int, bytes]:
    """Check the authentication code of a sealed message.

    Returns:
        The number and the content of the message.

    Raises:
        Refused: the message was not sealed with this key and direction.
    """
    number = int.from_bytes(sealed[:_NUMBER], "big")
    code, content = sealed[_NUMBER : _NUMBER + _CODE], sealed[_NUMBER + _CODE :]
    if not hmac.compare_digest(code, _code(key, direction, number, content)):
        raise Refused("a message without the code of this job")
    return number, content


def _code(key: bytes, direction: bytes, number: int, content: bytes) -> bytes:
    return hashlib.blake2b(direction + number.to_bytes(_NUMBER, "big") + content, key=key, digest_size=_CODE).digest()
