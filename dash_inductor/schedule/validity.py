"""Checks that the tables of a schedule for one problem are correct, and that it cannot hang."""

from __future__ import annotations

from collections.abc import Sequence

from .jobs import Job, jobs_of, tables
from .simulator import simulate
from .table_tile_schedule import Tables
from .tile_schedule import ClosedForm, Problem, TileSchedule


def coverage_faults(tile_schedule: TileSchedule, heads: int, n_q: int, n_kv: int, jobs: Sequence[Job]) -> list[str]:
    """Return, in words, where jobs break these rules: one CTA per kv tile, one step per visible pair, ranks 0 .. n-1.

    Args:
        tile_schedule: says which kv tiles are visible to each q tile.
        heads: the number of heads of the whole launch.
        n_q, n_kv: the numbers of tiles.
        jobs: the tables to check.
    """
    found = []
    owned = sorted((job.head, column.kv) for job in jobs for column in job.columns)
    if owned != [(head, kv) for head in range(heads) for kv in range(n_kv)]:
        found.append("the kv tiles are not owned exactly once each")
    ranks: dict[tuple[int, int], list[int]] = {}
    pairs = []
    for job in jobs:
        for column in job.columns:
            for q, rank in column.steps:
                pairs.append((job.head, q, column.kv))
                ranks.setdefault((job.head, q), []).append(rank)
    visible = []
    for head in range(heads):
        visible += [(head, q, kv) for q in range(n_q) for kv in tile_schedule.visible(head, q)]
    if sorted(pairs) != visible:
        found.append("the visible tile pairs are not computed exactly once each")
    for (head, q), values in sorted(ranks.items()):
        if sorted(values) != list(range(len(values))):
            found.append(f"head {head}, q tile {q}: ranks {sorted(values)} instead of 0 .. {len(values) - 1}")
    return found


def backward_wait(jobs: Sequence[Job]) -> tuple[int, int] | None:
    """Return a (waiting work id, awaited work id) whose awaited work id is not earlier; None if there is no such wait.

    None implies progress on any number of workers: work id 0 waits for no work id, and if all earlier work ids finish,
    every release that a work id waits for comes.  Within one job an earlier column counts as earlier.
    """
    at: dict[tuple[int, int, int], tuple[int, int]] = {}
    for job in jobs:
        for c, column in enumerate(job.columns):
            for q, rank in column.steps:
                at[job.head, q, rank] = (job.work_id, c)
    for (head, q, rank), place in at.items():
        awaited = at.get((head, q, rank - 1))
        if rank > 0 and awaited is not None and awaited >= place:
            return place[0], awaited[0]
    return None


def progress_faults(tile_schedule: TileSchedule, jobs: Sequence[Job], group: int = 1) -> list[str]:
    """Return, in words, how CTAs may wait for one another forever; empty if they cannot.

    Launch-ordered schedules may only wait for earlier work ids.  Other schedules must finish with the number of workers
    that they declare to need, in a simulation in which jobs are delayed only by the waits of the model.
    """
    if not tile_schedule.shared_accumulator:
        return []
    if not tile_schedule.co_resident:
        wait = backward_wait(jobs)
        return [] if wait is None else [f"work id {wait[0]} waits for work id {wait[1]}, which may not have started"]
    run = simulate(jobs, tile_schedule.resident, group=group)
    return [f"hangs with {tile_schedule.resident} resident CTAs, work ids {run.unfinished}"] if run.unfinished else []


def check(name: str, problem: Problem, jobs: Sequence[Job] | None = None) -> list[str]:
    """Return every fault of a schedule for a problem, in words; empty if it is correct and cannot hang.

    Args:
        name: the name of the schedule.
        problem: the problem.
        jobs: the work of every CTA, checked instead of what the schedule defines; None to check the schedule itself.

    Raises:
        ArgumentError: an unknown schedule or an unsupported mask.
    """
    jobs = tables(name, problem) if jobs is None else jobs
    tile_schedule, heads = ClosedForm(name, problem), problem.batch * problem.heads
    return coverage_faults(tile_schedule, heads, problem.n_q, problem.n_kv, jobs) + progress_faults(
        tile_schedule, jobs, problem.group
    )


def check_tables(tile_schedule: Tables, jobs: Sequence[Job] | None = None) -> list[str]:
    """Return every fault of the tile schedule of a data-dependent mask, in words; empty if it is correct.

    `jobs` are checked instead of the tile schedule's own, if given.
    """
    jobs = jobs_of(tile_schedule) if jobs is None else jobs
    p = tile_schedule.problem
    return coverage_faults(tile_schedule, p.batch * p.heads, p.n_q, p.n_kv, jobs) + progress_faults(tile_schedule, jobs)
