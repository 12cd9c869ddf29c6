"""Simulates timelines: of a schedule on any problem, and of a plan at a site."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..errors import ArgumentError
from ..kernels.families import family
from ..model.architectures import WORKERS, tables_of
from ..model.plan import Plan
from ..model.site import Site
from ..planning import nominal, planner, prediction
from ..schedule.jobs import scheduled_query_heads, tables
from ..schedule.simulator import Costs, Run, simulate
from ..schedule.tile_schedule import ClosedForm, Problem
from .lengths import Lengths, restricted
from .model import TIMES, Step, Timeline, Unit

MODEL_UNIT = Unit("units", "time; computing a tile pair takes 1")
"""The unit of costs that are relative to the computation of a tile pair."""

PLAN_UNIT = Unit("units", "time; computing 128 x 128 queries and keys takes 1 at best")
"""The unit of the planner's costs, see `kernels.family`."""

TILE_PAIRS = "tile pairs"
"""The name of errors about the size of a simulation."""

MOST_TILE_PAIRS = 1 << 18
"""The maximum number of tile pairs of a run that is simulated for a picture: some seconds of work."""

MOST_HIDDEN = 1 << 22
"""The maximum number of tile pairs before a mask that is data hides some of them: some seconds of work, too."""


def timeline(name: str, problem: Problem, workers: int, costs: Costs) -> Timeline:
    """Simulates a schedule on a problem and returns its timeline.

    Args:
        name: the schedule.
        problem: the problem.
        workers: the number of CTAs that run at the same time.
        costs: the costs of a tile pair, in the unit of the timeline.

    Raises:
        ArgumentError: the schedule is unknown or does not support the mask.
    """
    shared = ClosedForm(name, problem).shared_accumulator
    run = simulate(tables(name, problem), workers, costs, group=problem.group, ordered=shared)
    return of_run(name, run, workers, query_heads(problem.batch, problem.heads * problem.group), costs, problem.group)


def of_plan(
    site: Site,
    arch: str,
    plan: Plan,
    *,
    data: Lengths | None = None,
    gpu: str = prediction.GPU,
    workers: int | None = None,
) -> Timeline:
    """Simulates a plan at a site; times are in the unit of the planner's costs.

    Args:
        site: a site with static lengths and batch size.
        arch: as for `planner.plan`.
        plan: the plan.
        data: what the mask hides in addition to its band.  Kernels that read tile tables skip hidden tile pairs.
        gpu: the GPU whose measured times of tile schedules are used, one of `prediction.gpus`.
        workers: the number of CTAs that run at the same time, by default the architecture's nominal one.

    Raises:
        ArgumentError: sizes are dynamic, the data does not fit the site, the run has more than `MOST_TILE_PAIRS` tile
            pairs, or the architecture is unknown.
    """
    for name, size in (("batch", site.batch), ("q_len", site.q_len), ("kv_len", site.kv_len)):
        if size is None:
            raise ArgumentError(name, size, "a number: dynamic sizes have no timeline")
    if data is not None:
        data.check(site.batch or 0, site.q_len or 0, site.kv_len or 0)
    known = tables_of(arch)
    count = workers or WORKERS[known]
    candidate = next(
        c for kernel, c in planner.candidates(site, arch) if (kernel, c.dkdv, c.dq) == (plan.kernel, plan.dkdv, plan.dq)
    )
    passes = nominal.passes(plan.schedule, candidate, site.band, known)
    runs = [
        _pass(site, plan, example, _with_ends(steps, site, arch, plan, gpu), data, count, of_dq=index == 1)
        for index, (example, steps) in enumerate(passes)
    ]
    return runs[0] if len(runs) == 1 else _one_after_the_other(runs[1], runs[0])


def _with_ends(prices: Costs, site: Site, arch: str, plan: Plan, gpu: str) -> Costs:
    """The costs with the measured time that a tile schedule takes in addition to its steps, if there is one."""
    return replace(prices, epilogue=prices.compute * family(plan.kernel).beside_steps(site, arch, gpu))


def _pass(
    site: Site, plan: Plan, example: Problem, prices: Costs, data: Lengths | None, workers: int, *, of_dq: bool
) -> Timeline:
    """Simulates one kernel of a plan.

    Args:
        example: a problem with the tiles of the kernel.
        of_dq: whether it is the dq kernel of `two_pass`.  That has a CTA for every q tile of every query head, the last
            ones first, and goes over the kv tiles: `spt` with queries and keys swapped, without waits.
    """
    schedule = "spt" if of_dq else plan.schedule
    p = _problem(site, plan, example, of_dq=of_dq)
    hides = data is not None and family(plan.kernel).tile_schedules_by_tables
    _check_tile_pairs(p, MOST_HIDDEN if hides else MOST_TILE_PAIRS)  # before the tables are made
    jobs = tables(schedule, p)
    if data is not None and hides:
        jobs = restricted(jobs, data.seen(p), p.heads)
        if p.group * sum(len(column.steps) for job in jobs for column in job.columns) > MOST_TILE_PAIRS:
            raise _too_many(MOST_TILE_PAIRS)
    shared = ClosedForm(plan.schedule, p).shared_accumulator
    run = simulate(jobs, workers, prices, group=p.group, ordered=shared)
    found = of_run(plan.schedule, run, workers, query_heads(p.batch, site.q_heads), prices, p.group, PLAN_UNIT)
    if of_dq:
        return replace(found, steps=tuple(s._replace(kv=s.q, q=s.kv) for s in found.steps))
    members = scheduled_query_heads(p.group == 1, site.q_heads, site.kv_heads)
    order = [b * site.q_heads + member for b in range(p.batch) for group in members for member in group]
    return replace(found, steps=tuple(s._replace(head=order[s.head]) for s in found.steps))


def _check_tile_pairs(p: Problem, most: int) -> None:
    """Raises ArgumentError if a problem has more than `most` tile pairs, in a time that does not depend on its size."""
    pairs = 0
    for kv in range(min(p.n_kv, most + 1)):
        pairs += p.batch * p.heads * p.group * max(p.steps(kv), 1)
        if pairs > most:
            raise _too_many(most)


def _too_many(most: int) -> ArgumentError:
    allowed = f"at most {most} tile pairs for each schedule: fewer heads, batch elements or tokens look alike"
    return ArgumentError(TILE_PAIRS, f"more than {most}", allowed)


def _problem(site: Site, plan: Plan, example: Problem, *, of_dq: bool) -> Problem:
    """The problem of a site, with the tiles of `example`."""
    assert site.batch is not None
    assert site.q_len is not None
    assert site.kv_len is not None
    heads = site.q_heads if of_dq or family(plan.kernel).cta_per_query_head else site.kv_heads
    found = replace(
        example,
        band=site.band,
        q_len=site.q_len,
        kv_len=site.kv_len,
        batch=site.batch,
        heads=heads,
        group=site.q_heads // heads,
        head_chunk=plan.head_chunk,
    )
    if not of_dq:
        return found
    band = found.resolved.band
    lo, hi = (None if x is None else -x for x in (band.hi, band.lo))
    return replace(found, band=replace(band, lo=lo, hi=hi), q_len=site.kv_len, kv_len=site.q_len)


def _one_after_the_other(first: Timeline, second: Timeline) -> Timeline:
    """The dq kernel and the dk/dv kernel as one run, with consecutive work ids."""
    work_ids = 1 + max((s.work_id for s in first.steps), default=-1)
    later = (
        s._replace(work_id=s.work_id + work_ids, **{name: getattr(s, name) + first.end for name in TIMES})
        for s in second.steps
    )
    note = "first dq, then dk and dv"
    return replace(first, steps=(*first.steps, *later), end=first.end + second.end, note=note)


def query_heads(batch: int, heads: int) -> tuple[str, ...]:
    """The names of the query heads of all batch elements, batch element by batch element."""
    names = [f"head {head}" for head in range(heads)]
    return tuple(names if batch == 1 else (f"batch element {b}, {name}" for b in range(batch) for name in names))


def of_run(
    name: str, run: Run, workers: int, heads: Sequence[str], costs: Costs, group: int = 1, unit: Unit = MODEL_UNIT
) -> Timeline:
    """Makes the timeline of a simulated run.

    Args:
        name: the schedule.
        run: the result of `simulate` for these workers, costs and group.
        workers: the number of workers.
        heads: the names of all query heads; each head of the schedule has `group` consecutive ones.
        costs: the costs of a tile pair.
        group: the number of query heads per head of the schedule.
        unit: the unit of `costs`.
    """
    steps = tuple(
        Step(s.worker, s.work_id, s.accumulator[0] * group + s.accumulator[1], s.kv, s.accumulator[2], s.rank, *s[5:])
        for s in run.spans
    )
    end = max((s.written for s in steps), default=0.0) if math.isinf(run.makespan) else run.makespan
    note = ""
    if run.unfinished:
        note = f"hangs on {workers} workers: {len(run.unfinished)} CTAs never finish"
    return Timeline(
        name, unit, tuple(f"worker {w}" for w in range(workers)), tuple(heads), steps, end, bool(costs.depth), note=note
    )
