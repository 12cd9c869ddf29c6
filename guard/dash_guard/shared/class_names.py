"""Names of classes of ranks that must have equal bits, as messages have them; knows nothing of torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

LENGTH = 400
"""Characters of a class at most."""

LEARNED = "~"
"""Begins the name of a class that nobody has declared."""

_RUN = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?")


def spelled(ranks: Sequence[int]) -> str:
    """A class in words, such as ``0-3`` or ``1-13:4,18``: runs of equal distance."""
    runs, rest = [], sorted(ranks)
    while rest:
        run = rest[:1]
        stride = rest[1] - rest[0] if len(rest) > 1 else 1
        while len(run) < len(rest) and rest[len(run)] == run[-1] + stride:
            run.append(rest[len(run)])
        if len(run) == 2 and stride > 1:  # no run, and perhaps the first of the next one
            run.pop()
        rest = rest[len(run) :]
        runs.append(f"{run[0]}-{run[-1]}{f':{stride}' if stride > 1 else ''}" if len(run) > 1 else f"{run[0]}")
    return ",".join(runs)


@functools.lru_cache(maxsize=1024)
def members(name: str, world: int) -> tuple[int, ...] | None:
    """The ranks of a class that somebody may have made up; None if it is none."""
    found: set[int] = set()
    if len(name) > LENGTH:
        return None
    for part in name.removeprefix(LEARNED).split(","):
        run = _RUN.fullmatch(part)
        if run is None:
            return None
        first, last, stride = int(run[1]), int(run[2] or run[1]), int(run[3] or 1)
        if not (first <= last < world and stride):
            return None
        found.update(range(first, last + 1, stride))
    return tuple(sorted(found))
