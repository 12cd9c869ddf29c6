"""What ranks and the monitor agree on for heartbeats: their period, and the encoding of lists of ranks."""

from __future__ import annotations

from collections.abc import Sequence

PERIOD = 1.0
"""Seconds between two heartbeats of a rank."""


def packed(ranks: Sequence[int]) -> list[int]:
    """Encode ranks as [first, last, distance] if they are evenly spaced, otherwise as [-1, *ranks]."""
    distance = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if distance > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, distance)):
        return [ranks[0], ranks[-1], distance]
    return [-1, *ranks]


def unpacked(ranks: Sequence[int]) -> tuple[int, ...]:
    """Decode a list of ranks that `packed` has encoded; at most 2**20 ranks.

    Raises:
        ValueError: `packed` cannot have returned this.
    """
    if ranks[:1] == (-1,) or ranks[:1] == [-1]:
        return tuple(ranks[1:])
    first, last, distance = ranks
    found = range(first, last + 1, distance)
    if len(found) > 1 << 20:
        raise ValueError(f"{len(found)} ranks")
    return tuple(found)
