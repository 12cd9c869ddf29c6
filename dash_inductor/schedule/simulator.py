"""Discrete-event simulation of the ordered accumulation: CTAs run on workers, and dq writers wait for semaphores.

A job computes the tile pairs of its tile schedule one after the other and adds each partial dq tile to its accumulator,
which admits contributors in order of rank.  The timing model is that of "DASH: deterministic attention scheduling"
(arXiv 2601.21824):

* ``depth = 0``: adding occupies the worker, so a blocked add blocks everything after it (the paper's DAG model);
* ``depth >= 1``: a separate writer drains `depth` buffers, so computing step k+1 overlaps waiting and adding of step k
  and stalls only when all buffers are taken.

Every time is a maximum of sums of earlier times, so a job is advanced as far as known releases of semaphores allow, and
again when the release that it waits for becomes known.  Only the assignment of work ids needs the clock: the next work
id goes to the worker that is free first.  That is exact, because a job that is still blocked then depends on a work id
that starts no earlier.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # jobs import sympy, which `Costs` does not need
    from .jobs import Job

Accumulator = tuple[int, int, int]  # head, query head within the group, q tile


@dataclass(frozen=True)
class Costs:
    """The durations of a CTA's operations in a simulation, in an arbitrary common unit.

    Args:
        compute: computing one tile pair.
        reduce: adding one dq tile.
        handover: extra latency between two writers of one accumulator.
        epilogue: storing dk and dv at the end of a job.
        depth: dq buffers of a separate writer; 0 without one.
    """

    compute: float = 1.0
    reduce: float = 0.5
    handover: float = 0.0
    epilogue: float = 0.0
    depth: int = 0


class Span(NamedTuple):
    """One tile pair in a simulated run, with the worker (a slot for one CTA) and the work id that computed it.

    It is computed during ``start .. computed``, and added to its accumulator during ``write .. written``.
    """

    worker: int
    work_id: int
    accumulator: Accumulator
    kv: int
    rank: int
    start: float
    computed: float
    write: float
    written: float


@dataclass(frozen=True)
class Run:
    """Result of `simulate`; if the schedule hangs, `makespan` is infinite and `unfinished` lists the work ids."""

    makespan: float
    spans: tuple[Span, ...]
    unfinished: tuple[int, ...]

    def accumulation_order(self) -> dict[Accumulator, tuple[int, ...]]:
        """Return, for each accumulator (head, query head within the group, q tile), its kv tiles in order of adding."""
        order: dict[Accumulator, list[int]] = {}
        for span in sorted(self.spans, key=lambda s: (s.write, s.written, s.worker)):
            order.setdefault(span.accumulator, []).append(span.kv)
        return {accumulator: tuple(kvs) for accumulator, kvs in order.items()}


class _Active:
    """A job on a worker: its steps, its progress, and the times that the next step depends on."""

    def __init__(self, job: Job, worker: int, now: float, group: int) -> None:
        self.worker, self.work_id = worker, job.work_id
        self.steps = [
            ((job.head, g, q), column.kv, rank)
            for column in job.columns
            for g in range(group)
            for q, rank in column.steps
        ]
        self.ready = now  # when the next compute may start
        self.written: list[float] = []


def simulate(
    jobs: Sequence[Job],
    workers: int,
    costs: Costs = Costs(),
    *,
    group: int = 1,
    static: Sequence[Sequence[int]] | None = None,
    speeds: Sequence[float] | None = None,
    jitter: float = 0.0,
    seed: int = 0,
    ordered: bool = True,
) -> Run:
    """Simulate a run of `jobs`, given in the order of work ids, on a number of workers (slots for one CTA each).

    Args:
        jobs: the jobs.
        workers: the number of CTAs that run at a time.
        costs: the durations of operations.
        group: query heads per kv head; a job repeats each tile schedule for every query head, in ascending order.
        static: work id lists per worker (persistent CTAs); by default work ids are assigned to free workers.
        speeds: factor on the durations, per worker.
        jitter: relative half width of uniform noise on every duration.
        seed: the seed of the noise.
        ordered: False ignores the ranks, as atomics would.
    """
    rng = random.Random(seed)
    queues = [list(reversed(q)) for q in static] if static is not None else None
    releases: dict[tuple[Accumulator, int], float] = {}
    waiting: dict[tuple[Accumulator, int], _Active] = {}
    free = [(0.0, w) for w in range(workers)]
    spans: list[Span] = []
    finished: set[int] = set()
    makespan, next_work_id = 0.0, 0

    def duration(a: _Active, base: float) -> float:
        noise = 1.0 + jitter * rng.uniform(-1.0, 1.0) if jitter else 1.0
        return base * noise * (speeds[a.worker] if speeds is not None else 1.0)

    def advance(a: _Active) -> list[_Active]:
        """Run `a` until it blocks or ends; return the jobs whose semaphore is released."""
        nonlocal makespan
        woken: list[_Active] = []
        while len(a.written) < len(a.steps):
            k = len(a.written)
            accumulator, kv, rank = a.steps[k]
            released = 0.0
            if ordered and rank > 0:
                if (accumulator, rank - 1) not in releases:
                    waiting[accumulator, rank] = a
                    return woken
                released = releases[accumulator, rank - 1] + costs.handover
            computed = a.ready + duration(a, costs.compute)
            buffered = computed  # when the tile is in its buffer
            if costs.depth and k >= costs.depth:
                buffered = max(computed, a.written[k - costs.depth])
            write = max(buffered, released, a.written[-1] if a.written else 0.0)
            written = write + duration(a, costs.reduce)
            spans.append(Span(a.worker, a.work_id, accumulator, kv, rank, a.ready, computed, write, written))
            a.written.append(written)
            a.ready = buffered if costs.depth else written
            releases[accumulator, rank] = written
            if (accumulator, rank + 1) in waiting:
                woken.append(waiting.pop((accumulator, rank + 1)))
        end = max(a.ready + duration(a, costs.epilogue), a.written[-1] if a.written else 0.0)
        makespan = max(makespan, end)
        finished.add(a.work_id)
        heapq.heappush(free, (end, a.worker))
        return woken

    heapq.heapify(free)
    while free:
        now, worker = heapq.heappop(free)
        if queues is not None:
            if not queues[worker]:
                continue
            job = jobs[queues[worker].pop()]
        else:
            if next_work_id == len(jobs):
                break
            job, next_work_id = jobs[next_work_id], next_work_id + 1
        runnable = [_Active(job, worker, now, group)]
        while runnable:
            runnable += advance(runnable.pop())
    unfinished = tuple(job.work_id for job in jobs if job.work_id not in finished)
    return Run(math.inf if unfinished else makespan, tuple(spans), unfinished)
