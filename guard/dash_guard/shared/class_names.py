"""The names that messages use for classes of ranks, which must hold tensors with equal bits; imports no torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

LENGTH = 400
"""The largest number of characters of a class name."""

LEARNED = "~"
"""The prefix of the name of a class that the program has not declared."""

_RUN = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?")


def spelled(ranks: Sequence[int]) -> str:
    """The name of a class of ranks: its runs of evenly spaced ranks, such as ``0-3`` or ``1-13:4,18``."""
    runs, left = [], sorted(ranks)
    while left:
        run = left[:1]
        stride = left[1] - left[0] if len(left) > 1 else 1
        while len(run) < len(left) and left[len(run)] == run[-1] + stride:
            run.append(left[len(run)])
        if len(run) == 2 and stride > 1:  # two ranks are no run, and the second may begin the next run
            run.pop()
        left = left[len(run) :]
        runs.append(f"{run[0]}-{run[-1]}{f':{stride}' if stride > 1 else ''}" if len(run) > 1 else f"{run[0]}")
    return ",".join(runs)


@functools.lru_cache(maxsize=1024)
def members(name: str, world: int) -> tuple[int, ...] | None:
    """The ranks of a class of ranks, ascending, parsed from its name, which is not trusted; None if it is invalid.

    Args:
        name: the name.
        world: the number of ranks of the job.
    """
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
