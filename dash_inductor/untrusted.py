"""Reading what another process or machine wrote, and showing text from there.

Nothing here trusts a file: it is looked at before it is read, and counted before anything is built from it.  The reader
of a kind of file turns `Refused` and OSError into an error of its own, which names the file.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import stat
from collections.abc import Iterable
from typing import Any, BinaryIO

_DIGITS = 20
"""Characters of an integer: as many as 64 bits and a sign take."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_SHORT = reprlib.Repr()
_SHORT.maxstring = 80


class Refused(ValueError):
    """Says what was found instead of what is allowed, in words that need the name of the file in front of them."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, or a symbolic link to one; whatever else there is, this does not wait for it.

    Returns:
        The file, unbuffered.

    Raises:
        Refused: it is a FIFO, a device, a directory, or a name that no file can have.
        OSError: it cannot be opened.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except ValueError as error:  # a null character
        raise Refused(f"no file has such a name ({error})") from error
    kind = stat.S_IFMT(os.fstat(file).st_mode)
    if kind != stat.S_IFREG:
        os.close(file)
        raise Refused(f"this is {_KINDS.get(kind, 'no regular file')}, not a regular file")
    return open(file, "rb", buffering=0)


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a regular file of at most `most` bytes; raises as `open_regular` does, and for a longer file."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = bytearray()
        while size <= most and (part := file.read(min(1 << 20, most + 1 - len(content)))):
            content += part
            size = max(size, len(content))
    if size > most:
        raise Refused(f"a file of {size} bytes or more, where {most} are allowed")
    return bytes(content)


def parse_json(content: bytes, values: int) -> Any:
    """Parse strict JSON in UTF-8: without NaN, infinities, keys that repeat, and integers of more than 20 characters.

    Args:
        values: how many values there may be, counted before they are built: every comma, colon and opening bracket
            counts, those inside of texts too.

    Raises:
        Refused: it is not that.
    """
    found = sum(map(content.count, (b"[", b"{", b":", b",")))
    if found > values:
        raise Refused(f"JSON of {found} values, where {values} are allowed")
    try:
        return json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
        )
    except Refused:
        raise
    except (ValueError, RecursionError) as error:
        raise Refused(f"this is no JSON ({error})") from error


def printable(text: str) -> str:
    """`text` in one line, with an escape for every character that a terminal or a reader could take for something else.

    These are the control characters of ASCII and of Latin-1, line separators, marks that turn the direction of writing,
    other invisible marks, and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """`printable`, except that lines stay lines."""
    return "\n".join(map(printable, text.split("\n")))


def shortened(value: object) -> str:
    """A value from a file, to be named in a message: printable and short, however large and deep it is."""
    return _SHORT.repr(value)


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Refused(f"the key {shortened(key)} is there twice")
        found[key] = value
    return found


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise Refused(f"an integer of {len(digits)} characters, where {_DIGITS} are allowed")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise Refused(f"the number {shortened(digits)}, which is not finite")
    return value


def _constant(name: str) -> float:
    raise Refused(f"the number {name}, which JSON does not have")
