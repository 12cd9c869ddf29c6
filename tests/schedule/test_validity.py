"""Every schedule is right and cannot hang; broken ones are caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_inductor.errors import ArgumentError
from dash_inductor.model.mask import Band
from dash_inductor.schedule.jobs import Column, Job, tables
from dash_inductor.schedule.schedules import LEAST, NAMES, PARTS, define, supports
from dash_inductor.schedule.simulator import simulate
from dash_inductor.schedule.tile_schedule import ClosedForm, Problem
from dash_inductor.schedule.validity import backward_wait, check
from tests.support.schedules import names_for, problems


@settings(max_examples=60)
@given(problems(), st.data())
def test_every_schedule_is_right_and_live(p: Problem, data: st.DataObject) -> None:
    """Visible tiles once each, ranks 0 .. n-1, and no wait that could hang."""
    name = data.draw(st.sampled_from(names_for(p)))
    assert check(name, p) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_at_every_pair_of_counts(name: str) -> None:
    """All (n_q, n_kv) up to 7 x 7 with the tightest mask that the schedule supports."""
    band = next(b for b in (Band(0, 2), Band(0, None), Band()) if supports(name, b) is None)
    for n_q in range(1, 8):
        for n_kv in range(1, 8):
            assert check(name, Problem(band, n_q, n_kv, 1, 1, heads=2)) == []


BENT = [Band(), Band(0), Band(0, None, "bottom_right"), Band(-20), Band(3)]


@pytest.mark.parametrize("band", BENT, ids=str)
def test_bent_tile_schedules_at_many_counts(band: Band) -> None:
    """Few and many kv tiles to the rows of q tiles, all of them long ones, or half of them."""
    for n_q in (LEAST, LEAST + 1, 2 * LEAST - 1):
        for n_kv in (1, 2, LEAST // 2 - 1, LEAST // 2, LEAST // 2 + 1, LEAST, n_q + 1):
            assert check("bent_fold", Problem(band, n_q, n_kv, 1, 1, heads=2, head_chunk=3)) == []


def columns(name: str, p: Problem) -> list[dict[int, Column]]:
    """By head and kv tile."""
    found: list[dict[int, Column]] = [{} for _ in range(p.batch * p.heads)]
    for job in tables(name, p):
        found[job.head] |= {column.kv: column for column in job.columns}
    return found


@pytest.mark.parametrize("band", BENT, ids=str)
def test_tile_schedules_below_the_least_are_those_of_spt(band: Band) -> None:
    """Launched in the same order too; one q tile more, and they are not."""
    longest = LEAST + (3 if band == Band(3) else 0)  # tile 0 is not seen by the first three
    for n_q in (1, 7, longest - 1):
        p = Problem(band, n_q, n_q, 1, 1, batch=2, heads=3, head_chunk=2)
        assert tables("bent_fold", p) == tables("spt", p)
    p = Problem(band, longest, longest, 1, 1, batch=2, heads=3, head_chunk=2)
    assert tables("bent_fold", p) != tables("spt", p)
    assert all(bent != straight for bent, straight in zip(columns("bent_fold", p), columns("spt", p), strict=True))


def test_bent_fold_launches_long_tile_schedules_first() -> None:
    """The long tile schedules of all heads come first, the shortest of them first; then the others, longest first."""
    n = LEAST
    p = Problem(Band(0), n, n, 1, 1, batch=2, heads=3, head_chunk=2)
    jobs = tables("bent_fold", p)
    long, short = jobs[: len(jobs) // 2], jobs[len(jobs) // 2 :]
    for head in range(6):
        assert [job.columns[0].kv for job in long if job.head == head] == list(range(n // 2))[::-1]
        assert [job.columns[0].kv for job in short if job.head == head] == list(range(n // 2, n))
    bend = n // 2 - 1  # where the shortest of the long ones begins
    tile_schedule = [q for q, _ in long[-1].columns[0].steps]
    assert tile_schedule == [*range(bend), *range(n - 1, bend - 1, -1)]
    assert [q for q, _ in short[0].columns[0].steps] == list(range(n - 1, n // 2 - 1, -1))
    assert list(dict.fromkeys(job.head for job in long)) == list(dict.fromkeys(job.head for job in short))


@settings(max_examples=60)
@given(problems(max_tiles=16), st.sampled_from(("shift", "symmetric_shift")), st.booleans())
def test_co_residency_bound_is_exact(p: Problem, name: str, causal: bool) -> None:
    """Finishes with as many workers as declared, hangs with one less."""
    if name not in names_for(p):
        p = replace(p, band=Band(0, None) if causal and name == "symmetric_shift" else Band())
    bound = ClosedForm(name, p).resident
    assert not simulate(tables(name, p), bound, group=p.group).unfinished
    if bound > 1:
        assert simulate(tables(name, p), bound - 1, group=p.group).unfinished


def test_bound_of_the_usual_case_is_all_ctas_of_a_head() -> None:
    assert ClosedForm("shift", Problem(Band(), 8, 12, 1, 1, heads=4)).resident == 12
    assert ClosedForm("symmetric_shift", Problem(Band(0, None), 12, 12, 1, 1, heads=4)).resident == 6
    assert ClosedForm("shift", Problem(Band(), 8, 12, 1, 1, heads=4, head_chunk=3)).resident == 11 * 3 + 1


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("shift", "symmetric_shift", "two_pass")])
def test_launch_ordered_schedules_finish_on_one_worker(name: str) -> None:
    p = Problem(Band(0, None), 11, 7, 1, 2, batch=2, heads=3, group=2, head_chunk=4)
    assert define(name, p.band).resident is None
    assert not simulate(tables(name, p), 1, group=2).unfinished


def _with_ranks_of(jobs: tuple[Job, ...], other: tuple[Job, ...]) -> tuple[Job, ...]:
    ranks = {(j.head, c.kv, q): rank for j in other for c in j.columns for q, rank in c.steps}
    return tuple(
        replace(
            j,
            columns=tuple(Column(c.kv, tuple((q, ranks[j.head, c.kv, q]) for q, _ in c.steps)) for c in j.columns),
        )
        for j in jobs
    )


def test_ascending_ranks_under_spt_launch_are_caught() -> None:
    p = Problem(Band(0, None), 6, 6, 1, 1)
    broken = _with_ranks_of(tables("spt", p), tables("ascending", p))
    assert any("waits for work id" in fault for fault in check("spt", p, broken))
    assert backward_wait(broken) is not None
    assert simulate(broken, 5).unfinished


def test_ring_with_ranks_against_its_tile_schedule_is_caught() -> None:
    p = Problem(Band(), 6, 6, 1, 1)
    jobs = tables("shift", p)
    flipped = tuple(
        replace(j, columns=tuple(Column(c.kv, tuple((q, 5 - r) for q, r in c.steps)) for c in j.columns)) for j in jobs
    )
    assert any("hangs with 6 resident CTAs" in fault for fault in check("shift", p, flipped))


def test_missing_and_doubled_tiles_are_caught() -> None:
    p = Problem(Band(), 4, 3, 1, 1)
    jobs = tables("ascending", p)
    assert len(check("ascending", p, jobs[:-1])) == 2  # owned tiles and pairs; the remaining ranks are 0, 1
    assert any("ranks [0, 0, 1, 2]" in fault for fault in check("ascending", p, (*jobs, jobs[0])))


@pytest.mark.parametrize(("q_len", "kv_len"), [(13, 9), (2 * LEAST + 1, 2 * LEAST - 20)])
def test_tile_schedules_and_ranks_are_the_same_for_every_head(q_len: int, kv_len: int) -> None:
    """Whichever and however many others there are, and however they are launched; under other bands they differ."""
    for name in NAMES:
        band = Band(0, None) if name != "shift" else Band()
        (alone,) = columns(name, Problem(band, q_len, kv_len, 2, 2))
        for batch, heads, head_chunk in ((1, 2, 1), (1, 3, 3), (4, 1, 1), (2, 5, 7)):
            p = Problem(band, q_len, kv_len, 2, 2, batch=batch, heads=heads, head_chunk=head_chunk)
            assert columns(name, p) == [alone] * (batch * heads), (name, batch, heads, head_chunk)
        assert columns(name, Problem(band, q_len + 2, kv_len, 2, 2)) != [alone]


def test_parts_and_names() -> None:
    assert set(PARTS) == set(NAMES)
    for name in NAMES:
        assert define(name, Band()).parts == PARTS[name]


def test_unsupported_masks_are_named() -> None:
    assert supports("shift", Band(0, None)) == "shift needs the full mask"
    assert supports("symmetric_shift", Band(0, 5)) is not None
    with pytest.raises(ArgumentError, match="shift needs the full mask"):
        tables("shift", Problem(Band(0, None), 4, 4, 1, 1))
    with pytest.raises(ArgumentError, match="'symmetric_shift'"):
        supports("diagonal", Band())


@settings(max_examples=60)
@given(problems(), st.integers(2, 5), st.data())
def test_members_of_a_group_are_launched_in_their_order(p: Problem, group: int, data: st.DataObject) -> None:
    """The Hopper kernel sums dk and dv over members, heads of the schedule one after the other: each waits for a lower
    work id, under every schedule, head chunk and number of heads."""
    name = data.draw(st.sampled_from([n for n in names_for(p) if n != "two_pass"]))
    orders: dict[tuple[int, int, int], list[int]] = {}
    for job in tables(name, replace(p, heads=p.heads * group, group=1)):
        b, place = divmod(job.head, p.heads * group)
        member, head = divmod(place, p.heads)
        for column in job.columns:
            orders.setdefault((b, head, column.kv), []).append(member)
    assert len(orders) == p.batch * p.heads * p.n_kv
    assert all(members == list(range(group)) for members in orders.values())
