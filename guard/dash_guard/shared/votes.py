"""Pure functions that group ranks by what they have computed, and find the minority or the first difference."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence


def groups(values: Mapping[int, Hashable]) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks with equal values, the largest group first, equally large groups by their first rank."""
    by_value: dict[Hashable, list[int]] = {}
    for rank in sorted(values):
        by_value.setdefault(values[rank], []).append(rank)
    return tuple(tuple(group) for group in sorted(by_value.values(), key=lambda group: (-len(group), group)))


def minority(of: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ranks outside the largest group if that has more than half of all ranks; () otherwise.

    Args:
        of: groups of ranks, the largest first, see `groups`.
    """
    count = sum(map(len, of))
    if len(of) < 2 or 2 * len(of[0]) <= count:
        return ()
    return tuple(sorted(rank for group in of[1:] for rank in group))


def classes(works: Mapping[int, str]) -> list[list[int]]:
    """Groups the ranks that do the same work and therefore must compute the same; returns lists of ranks.

    Args:
        works: for each rank, a text that identifies its work.
    """
    by_work: dict[str, list[int]] = {}
    for rank in sorted(works):
        by_work.setdefault(works[rank], []).append(rank)
    return list(by_work.values())


def first_difference(rows: Mapping[int, Sequence[Hashable]], peers: Sequence[Sequence[int]]) -> int | None:
    """The first index at which ranks of one class differ, None if there is none; a shorter row differs after its end.

    Args:
        rows: for each rank, what it has computed, in order.
        peers: the classes: lists of ranks that must compute the same, see `classes`.
    """
    places = [place for ranks in peers if (place := _first([rows[rank] for rank in ranks])) is not None]
    return min(places, default=None)


def _first(rows: Sequence[Sequence[Hashable]]) -> int | None:
    if all(row == rows[0] for row in rows):
        return None
    shortest = min(map(len, rows))
    return next((n for n in range(shortest) if len({row[n] for row in rows}) > 1), shortest)
