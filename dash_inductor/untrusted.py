"""Reads files that another process or machine wrote, and makes text from them safe to print.

A file is never trusted: its kind and size are checked before it is read, and its values are counted before objects are
built from it.  Readers of a kind of file turn `Refused` and OSError into an error of their own, which names the file.
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
"""The maximum number of characters of an integer: enough for 64 bits and a sign."""

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
    """Raised for a file that is not of the required kind, size or content; the caller adds the file's name."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file, or a symbolic link to one, for reading; never blocks on other kinds of files.

    Returns:
        The file, binary and unbuffered.

    Raises:
        Refused: it is a FIFO, a device or a directory, or the name is not valid for a file.
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
    """Reads a regular file of at most `most` bytes and returns its content.

    Raises:
        Refused: the file is longer, or `open_regular` rejects it.
        OSError: it cannot be opened or read.
    """
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
    """Parses strict JSON in UTF-8: without NaN, infinities, repeated keys, or integers of more than 20 characters.

    Args:
        content: the JSON text.
        values: the maximum number of values, checked before any is built: every comma, colon and opening bracket
            counts, including those inside strings.

    Raises:
        Refused: the content does not satisfy these rules.
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
    """Returns `text` with escapes for all characters that a terminal or reader could misinterpret, as one line.

    These are the control characters of ASCII and Latin-1, line separators, marks that change the writing direction,
    other invisible marks, and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """Returns `text` with the escapes of `printable`, but keeps its line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def shortened(value: object) -> str:
    """Returns a printable, short text of a value from a file, for messages, however large or deeply nested it is."""
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
