"""A schedule written out for one problem: what every CTA does, in order.

Simulator, checks, timeline and reference executor read these tables; they come from the expressions that the kernels
run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from .walk import ClosedForm, Problem, Walk


@dataclass(frozen=True)
class Column:
    """The walk over one kv tile: (q tile, rank) in order of time."""

    kv: int
    steps: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Job:
    """The work of the CTA with this ticket; head is ``b * heads + h``."""

    ticket: int
    head: int
    columns: tuple[Column, ...]


def walked_query_heads(per_query_head: bool, q_heads: int, kv_heads: int) -> tuple[tuple[int, ...], ...]:
    """For each head of the schedule, in its order, the query heads that its CTAs walk for, one after the other.

    Where every query head has CTAs of its own, the query heads are the heads, first member 0 of all groups, then member
    1, and so on.  Elsewhere a kv head is a head, and its CTAs walk for the whole group.  Either way head `h` belongs to
    kv head ``h % kv_heads``.

    Args:
        per_query_head: whether every query head has CTAs of its own (`Family.cta_per_query_head`).
        q_heads, kv_heads: per batch element.
    """
    group = q_heads // kv_heads
    members = [[kv_head * group + member for kv_head in range(kv_heads)] for member in range(group)]
    if per_query_head:
        return tuple((head,) for heads in members for head in heads)
    return tuple(zip(*members, strict=True))


def jobs_of(walk: Walk) -> tuple[Job, ...]:
    """All jobs of a walk in launch order."""
    seen: dict[tuple[int, int], tuple[Column, ...]] = {}
    jobs = []
    for ticket in range(walk.tickets):
        head, slot = walk.launch(ticket)
        key = slot, walk.kind(head)
        if key not in seen:
            seen[key] = tuple(_columns(walk, head, slot))
        jobs.append(Job(ticket, head, seen[key]))
    return tuple(jobs)


def _columns(walk: Walk, head: int, slot: int) -> Iterator[Column]:
    for part in range(walk.parts):
        kv = walk.kv_tile(head, slot, part)
        if kv is not None:
            tiles = [walk.q_tile(head, kv, step) for step in range(walk.visits(head, kv))]
            yield Column(kv, tuple((q, walk.rank(head, q, kv)) for q in tiles))


@lru_cache(maxsize=64)
def tables(name: str, problem: Problem) -> tuple[Job, ...]:
    """All jobs in launch order.  Raises ArgumentError on an unknown schedule or an unsupported mask."""
    return jobs_of(ClosedForm(name, problem))
