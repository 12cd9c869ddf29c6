"""The simulator: closed formulas, the order of accumulation, hangs."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_inductor.model.mask import Band
from dash_inductor.schedule.jobs import Job, tables
from dash_inductor.schedule.simulator import Costs, simulate
from dash_inductor.schedule.tile_schedule import ClosedForm, Problem
from tests.support.schedules import names_for, problems

FULL, CAUSAL = Band(), Band(0, None)


def _worker_per_tile(jobs: tuple[Job, ...], n: int, mirror: bool = False) -> list[list[int]]:
    """Worker i owns kv tile i of every head; `mirror`: tile n-1-i of odd heads."""
    static: list[list[int]] = [[] for _ in range(n)]
    for job in jobs:
        kv = job.columns[0].kv
        static[n - 1 - kv if mirror and job.head % 2 else kv].append(job.work_id)
    return static


def _makespan(name: str, band: Band, n: int, heads: int, r: float, mirror: bool = False) -> float:
    jobs = tables(name, Problem(band, n, n, 1, 1, heads=heads))
    return simulate(jobs, n, Costs(1.0, r), static=_worker_per_tile(jobs, n, mirror)).makespan


@pytest.mark.parametrize("n", [4, 8, 16, 32])
@pytest.mark.parametrize("r", [0.25, 0.5, 1.0])
def test_closed_formulas(n: int, r: float) -> None:
    """Depth 0, compute 1, m heads on n workers; all numbers are dyadic, so equality is exact."""
    m = 6
    stagger, step = (n - 1) * r, 1 + r
    assert _makespan("ascending", FULL, n, m, r) == m * n * step + stagger
    assert _makespan("ascending", CAUSAL, n, m, r) == m * n * step + stagger
    assert _makespan("ascending", CAUSAL, n, 1, r) == n * step + stagger
    assert _makespan("descending", CAUSAL, n, m, r, mirror=True) == m * (n + 1) * step / 2 + stagger
    assert _makespan("shift", FULL, n, m, r) == m * n * step
    pairs = simulate(tables("symmetric_shift", Problem(CAUSAL, n, n, 1, 1, heads=m)), n // 2, Costs(1.0, r))
    assert pairs.makespan == m * (n + 1) * step  # n/2 workers


@pytest.mark.parametrize("n", [4, 8, 16])
def test_where_the_formula_of_descending_holds(n: int) -> None:
    """For an even number of heads if an add takes no longer than the compute, and for two heads always."""
    for m in (1, 2, 3, 4, 6, 8):
        for r in (0.25, 0.5, 1.0, 1.5, 2.0, 4.0):
            formula = m * (n + 1) * (1 + r) / 2 + (n - 1) * r
            found = _makespan("descending", CAUSAL, n, m, r, mirror=True)
            if m % 2 == 0 and (r <= 1.0 or m == 2):
                assert found == formula
            elif m % 2 == 0:
                assert found > formula
    if n == 16:
        assert _makespan("descending", CAUSAL, n, 8, 4.0, mirror=True) == 535
        assert 8 * (n + 1) * 5 / 2 + (n - 1) * 4 == 400


@pytest.mark.parametrize(("n_q", "n_kv"), [(8, 5), (9, 9), (40, 7), (12, 8), (3, 1)])
def test_shift_meets_the_work_bound_for_any_counts(n_q: int, n_kv: int) -> None:
    jobs = tables("shift", Problem(FULL, n_q, n_kv, 1, 1, heads=3))
    assert simulate(jobs, n_kv, Costs(1.0, 0.5)).makespan == 3 * n_q * 1.5


@pytest.mark.parametrize(("n", "ratio"), [(4, 2), (8, 2), (16, 2), (8, 4)])
def test_symmetric_shift_meets_the_work_bound_with_tall_kv_tiles(n: int, ratio: int) -> None:
    jobs = tables("symmetric_shift", Problem(CAUSAL, n * ratio, n * ratio, 1, ratio, heads=4))
    assert simulate(jobs, n // 2, Costs(1.0, 0.5)).makespan == 4 * (n + 1) * ratio * 1.5


def test_writer_overlap_reaches_the_larger_of_compute_and_reduce() -> None:
    """One job of 20 steps: 20 (c + r) without a writer, 20 max(c, r) plus the other one with it."""
    jobs = tables("ascending", Problem(FULL, 20, 1, 1, 1))
    assert simulate(jobs, 1, Costs(1.0, 0.5)).makespan == 30.0
    assert simulate(jobs, 1, Costs(1.0, 0.5, depth=1)).makespan == 20.5
    assert simulate(jobs, 1, Costs(1.0, 2.0, depth=1)).makespan == 41.0


def test_handover_and_epilogue_cost_time() -> None:
    jobs = tables("ascending", Problem(FULL, 1, 3, 1, 1))
    assert simulate(jobs, 3, Costs(1.0, 0.5)).makespan == 2.5
    assert simulate(jobs, 3, Costs(1.0, 0.5, handover=0.25, epilogue=1.0)).makespan == 4.0


@settings(max_examples=40)
@given(problems(max_tiles=40, max_heads=2), st.data(), st.integers(0, 2), st.integers(0, 2**20))
def test_order_does_not_depend_on_speeds_or_workers(p: Problem, data: st.DataObject, depth: int, seed: int) -> None:
    name = data.draw(st.sampled_from([n for n in names_for(p) if n != "two_pass"]))
    rng, runs = random.Random(seed), []
    for _ in range(2):
        workers = rng.randint(bound := ClosedForm(name, p).resident, max(200, bound))
        speeds = [rng.uniform(0.2, 5.0) for _ in range(workers)]
        costs = Costs(1.0, rng.uniform(0.1, 2.0), 0.1, 1.0, depth)
        runs.append(
            simulate(tables(name, p), workers, costs, group=p.group, speeds=speeds, jitter=0.5, seed=rng.randint(0, 99))
        )
    assert runs[0].accumulation_order() == runs[1].accumulation_order()
    assert not runs[0].unfinished
    by_rank: dict[tuple[int, int], list[int]] = {}
    for job in tables(name, p):
        for column in job.columns:
            for q, rank in column.steps:
                by_rank.setdefault((job.head, q), [-1] * p.n_kv)[rank] = column.kv
    for (head, _, q), order in runs[0].accumulation_order().items():
        assert order == tuple(kv for kv in by_rank[head, q] if kv >= 0)


def test_without_ranks_the_order_varies() -> None:
    """Negative control: the same harness notices an unordered accumulation."""
    jobs = tables("ascending", Problem(FULL, 8, 8, 1, 1))
    orders = [simulate(jobs, 8, jitter=0.5, seed=seed, ordered=False).accumulation_order() for seed in range(2)]
    assert orders[0] != orders[1]


def test_a_hang_is_reported() -> None:
    run = simulate(tables("shift", Problem(FULL, 4, 4, 1, 1)), 3)
    assert run.makespan == math.inf
    assert run.unfinished == (0, 1, 2, 3)
