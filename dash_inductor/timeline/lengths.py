"""Masks that are data, for the simulator: lengths of documents and of valid keys, and which tile pairs are seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ArgumentError
from ..model.mask import Band
from ..schedule.jobs import Column, Job
from ..schedule.walk import Problem

Seen = tuple[tuple[bool, ...], ...]
"""``seen[q][kv]``: whether some query of a q tile sees a key of a kv tile, in one batch element."""


@dataclass(frozen=True)
class Lengths:
    """The pairs that a mask hides beside its band.

    Args:
        documents: lengths of the documents that every sequence holds, one after the other; None where there are none.
            Their sum is the length of the queries and of the keys.
        valid: how many keys, from the first on, are valid in each batch element; None if all are.
    """

    documents: tuple[int, ...] | None = None
    valid: tuple[int, ...] | None = None

    def check(self, batch: int, q_len: int, kv_len: int) -> None:
        """Raise ArgumentError unless this fits tensors of these sizes."""
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
        """The tile pairs that are seen, for each batch element."""
        self.check(problem.batch, problem.q_len, problem.kv_len)
        counts = self.valid if self.valid is not None else (problem.kv_len,) * problem.batch
        found = {count: self._seen(problem, count) for count in set(counts)}
        return tuple(found[count] for count in counts)

    def _seen(self, p: Problem, valid: int) -> Seen:
        band = p.resolved.band
        ends: list[tuple[int, int]] = []  # documents, as first and end
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
    """Whether a row of one interval (first, end) sees a key of the other; the band is anchored top left."""
    if rows[0] >= rows[1] or keys[0] >= keys[1]:
        return False
    least, greatest = rows[0] - (keys[1] - 1), rows[1] - 1 - keys[0]
    return (band.lo is None or greatest >= band.lo) and (band.hi is None or least <= band.hi)


def restricted(jobs: Sequence[Job], seen: Sequence[Seen], heads: int) -> tuple[Job, ...]:
    """The jobs of a band's closed form without the pairs that nobody sees: Note [Tables] in `schedule.table_walk`.

    Args:
        seen: for each batch element.
        heads: of the schedule, per batch element.
    """
    contributors: dict[tuple[int, int], list[int]] = {}
    for job in jobs:
        for column in job.columns:
            for q, rank in column.steps:
                if seen[job.head // heads][q][column.kv]:
                    contributors.setdefault((job.head, q), []).append(rank)
    place = {key: {rank: i for i, rank in enumerate(sorted(ranks))} for key, ranks in contributors.items()}

    def walk(job: Job, column: Column) -> Column:
        visible = seen[job.head // heads]
        kept = ((q, place[job.head, q][rank]) for q, rank in column.steps if visible[q][column.kv])
        return Column(column.kv, tuple(kept))

    return tuple(Job(job.ticket, job.head, tuple(walk(job, column) for column in job.columns)) for job in jobs)
