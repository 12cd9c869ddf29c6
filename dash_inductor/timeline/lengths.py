"""Data-dependent masks for the simulator: document lengths and numbers of valid keys, and the tile pairs they show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ArgumentError
from ..model.mask import Band
from ..schedule.jobs import Column, Job
from ..schedule.tile_schedule import Problem

Seen = tuple[tuple[bool, ...], ...]
"""``seen[q][kv]``: whether any query of a q tile sees any key of a kv tile, in one batch element."""


@dataclass(frozen=True)
class Lengths:
    """The lengths that define which pairs a mask hides in addition to its band.

    Args:
        documents: the lengths of the consecutive documents in every sequence; None for none.  Their sum is the number
            of queries and of keys.
        valid: the number of valid keys, from the first one, in each batch element; None if all are valid.
    """

    documents: tuple[int, ...] | None = None
    valid: tuple[int, ...] | None = None

    def check(self, batch: int, q_len: int, kv_len: int) -> None:
        """Raises ArgumentError unless the lengths fit a batch of this many elements, queries and keys."""
        if self.documents is not None:
            if any(length < 1 for length in self.documents):
                raise ArgumentError("documents", self.documents, "lengths >= 1")
            if not sum(self.documents) == q_len == kv_len:
                allowed = f"lengths whose sum is that of the queries, {q_len}, and of the keys, {kv_len}"
                raise ArgumentError("documents", self.documents, allowed)
        if self.valid is not None and (
            len(self.valid) != batch or not all(0 <= count <= kv_len for count in self.valid)
        ):
            raise ArgumentError("keys", self.valid, f"{batch} numbers from 0 to {kv_len}, one for each batch element")

    def seen(self, problem: Problem) -> tuple[Seen, ...]:
        """Returns which tile pairs are visible in each batch element, as bools [q tile][kv tile]."""
        self.check(problem.batch, problem.q_len, problem.kv_len)
        counts = self.valid if self.valid is not None else (problem.kv_len,) * problem.batch
        found = {count: self._seen(problem, count) for count in set(counts)}
        return tuple(found[count] for count in counts)

    def _seen(self, p: Problem, valid: int) -> Seen:
        band = p.resolved.band
        ends: list[tuple[int, int]] = []  # intervals [first, end) of documents
        for length in self.documents or (max(p.q_len, p.kv_len),):
            first = ends[-1][1] if ends else 0
            ends.append((first, first + length))

        def pair(q: int, kv: int) -> bool:
            rows = q * p.block_q, min((q + 1) * p.block_q, p.q_len)
            keys = kv * p.block_kv, min((kv + 1) * p.block_kv, valid)
            return any(
                _meets(band, (max(rows[0], first), min(rows[1], end)), (max(keys[0], first), min(keys[1], end)))
                for first, end in ends
                if first < rows[1] and rows[0] < end
            )

        return tuple(tuple(pair(q, kv) for kv in range(p.n_kv)) for q in range(p.n_q))


def _meets(band: Band, rows: tuple[int, int], keys: tuple[int, int]) -> bool:
    """Whether any row in an interval [first, end) sees any key in the other; the band is anchored top left."""
    if rows[0] >= rows[1] or keys[0] >= keys[1]:
        return False
    least, greatest = rows[0] - (keys[1] - 1), rows[1] - 1 - keys[0]
    return (band.lo is None or greatest >= band.lo) and (band.hi is None or least <= band.hi)


def restricted(jobs: Sequence[Job], seen: Sequence[Seen], heads: int) -> tuple[Job, ...]:
    """Removes the tile pairs that a mask hides from the jobs of a band's schedule, and renumbers the other ranks.

    This follows Note [Tables] in `schedule.table_tile_schedule`.

    Args:
        jobs: the jobs for all tile pairs of the band; a job is what one CTA executes for one work id.
        seen: the visible tile pairs of each batch element, as `Lengths.seen` returns them.
        heads: the number of heads of the schedule per batch element.
    """
    contributors: dict[tuple[int, int], list[int]] = {}
    for job in jobs:
        for column in job.columns:
            for q, rank in column.steps:
                if seen[job.head // heads][q][column.kv]:
                    contributors.setdefault((job.head, q), []).append(rank)
    place = {key: {rank: i for i, rank in enumerate(sorted(ranks))} for key, ranks in contributors.items()}

    def tile_schedule(job: Job, column: Column) -> Column:
        visible = seen[job.head // heads]
        kept = ((q, place[job.head, q][rank]) for q, rank in column.steps if visible[q][column.kv])
        return Column(column.kv, tuple(kept))

    return tuple(
        Job(job.work_id, job.head, tuple(tile_schedule(job, column) for column in job.columns)) for job in jobs
    )
