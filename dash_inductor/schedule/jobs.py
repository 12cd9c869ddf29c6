"""A schedule as tables for one problem: what every CTA does, in order.

The simulator, the checks, the timeline and the reference executor read these tables, which are computed from the
expressions that the kernels run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from .tile_schedule import ClosedForm, Problem, TileSchedule


@dataclass(frozen=True)
class Column:
    """The tile schedule of one kv tile: (q tile, rank) in order of time."""

    kv: int
    steps: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Job:
    """The work of the CTA that holds this work id; head is ``b * heads + h``."""

    work_id: int
    head: int
    columns: tuple[Column, ...]


def scheduled_query_heads(per_query_head: bool, q_heads: int, kv_heads: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each head of the schedule, the query heads that its CTAs process, one after the other.

    If every query head has its own CTAs, the heads of the schedule are the query heads: member 0 of all groups first,
    then member 1, and so on.  Otherwise they are the kv heads, whose CTAs process the whole group.  In both cases head
    `h` belongs to kv head ``h % kv_heads``.

    Args:
        per_query_head: whether every query head has its own CTAs (`Family.cta_per_query_head`).
        q_heads, kv_heads: the numbers of heads per batch element.
    """
    group = q_heads // kv_heads
    members = [[kv_head * group + member for kv_head in range(kv_heads)] for member in range(group)]
    if per_query_head:
        return tuple((head,) for heads in members for head in heads)
    return tuple(zip(*members, strict=True))


def jobs_of(tile_schedule: TileSchedule) -> tuple[Job, ...]:
    """Return all jobs of a tile schedule in launch order."""
    seen: dict[tuple[int, int], tuple[Column, ...]] = {}
    jobs = []
    for work_id in range(tile_schedule.work_ids):
        head, cta_index = tile_schedule.launch(work_id)
        key = cta_index, tile_schedule.kind(head)
        if key not in seen:
            seen[key] = tuple(_columns(tile_schedule, head, cta_index))
        jobs.append(Job(work_id, head, seen[key]))
    return tuple(jobs)


def _columns(tile_schedule: TileSchedule, head: int, cta_index: int) -> Iterator[Column]:
    for part in range(tile_schedule.parts):
        kv = tile_schedule.kv_tile(head, cta_index, part)
        if kv is not None:
            tiles = [tile_schedule.q_tile(head, kv, step) for step in range(tile_schedule.visits(head, kv))]
            yield Column(kv, tuple((q, tile_schedule.rank(head, q, kv)) for q in tiles))


@lru_cache(maxsize=64)
def tables(name: str, problem: Problem) -> tuple[Job, ...]:
    """Return all jobs of the schedule `name` for a problem, in launch order.

    Raises:
        ArgumentError: an unknown schedule or an unsupported mask.
    """
    return jobs_of(ClosedForm(name, problem))
