"""Files of recordings: what every one begins with, and frames that no recorder writes."""

from __future__ import annotations

import json
import zlib
from typing import Any

from dash_guard.recordings.file import ENTRY, HEAD, MAGIC, STEP


def environment(rank: int = 0, world_size: int = 1, **facts: Any) -> dict[str, Any]:
    """The first frame, with further facts."""
    return {"type": "environment", "rank": rank, "world_size": world_size, "every": 1, **facts}


def frame(content: bytes, length: int | None = None, checksum: int | None = None) -> bytes:
    """A frame, by default a sound one."""
    length = len(content) if length is None else length
    return HEAD.pack(length, zlib.crc32(content) if checksum is None else checksum) + content


def objects(*contents: Any) -> bytes:
    """Frames of JSON; a text or bytes stand for themselves."""
    encoded = (
        c if isinstance(c, bytes) else c.encode() if isinstance(c, str) else json.dumps(c).encode() for c in contents
    )
    return b"".join(frame(b"J" + each) for each in encoded)


def named(*names: tuple[str, str, str]) -> bytes:
    return objects({"type": "names", "names": names})


def step(number: int, *numbers: int, count: int | None = None) -> bytes:
    """A frame of a step with fingerprints of zeros; `count` is how many it says that there are."""
    entries = b"".join(ENTRY.pack(each, bytes(16)) for each in numbers)
    return frame(b"S" + STEP.pack(number, len(numbers) if count is None else count) + entries)


END = objects({"type": "end"})
NAME = ("input", "Model", "float32 [2]")


def sound(rank: int = 0, world_size: int = 1, *names: tuple[str, str, str], steps: int = 2, **facts: Any) -> bytes:
    """A whole file, with these names in every step."""
    names = names or (NAME,)
    body = b"".join(step(n, *range(len(names))) for n in range(1, steps + 1))
    return MAGIC + objects(environment(rank, world_size, **facts)) + named(*names) + body + END
