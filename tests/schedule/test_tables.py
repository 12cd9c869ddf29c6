"""Masks that are data: tile schedules are the closed form's, restricted; ranks count what is seen; nothing can hang."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dash_inductor.errors import ArgumentError
from dash_inductor.model.mask import Band
from dash_inductor.schedule.jobs import jobs_of
from dash_inductor.schedule.schedules import LEAST, supports
from dash_inductor.schedule.simulator import simulate
from dash_inductor.schedule.table_tile_schedule import Tables, forward_packed_tiles, packed_tile
from dash_inductor.schedule.tile_schedule import ClosedForm, Problem
from dash_inductor.schedule.validity import backward_wait, check_tables
from dash_inductor.schedule.visibility import EMPTY, FULL, PARTIAL, Pairs, tile_pairs

from ..support.tile_pairs import random_mask, random_pairs

SCHEDULES = ("ascending", "descending", "spt", "bent_fold")


def within(problem: Problem, pairs: Pairs) -> list[list[int]]:
    """The pairs that the band lets through."""
    closed = ClosedForm("two_pass", replace(problem, batch=1, heads=1))
    shown = [set(closed.visible(0, q)) for q in range(problem.n_q)]
    return [[kind if kv in shown[q] else EMPTY for kv, kind in enumerate(row)] for q, row in enumerate(pairs)]


def random_tables(seed: int, name: str, *, by_head: bool = False) -> Tables:
    """Any tile pairs of any band that the schedule has, batch and heads and head chunks of any size.

    Every other one under `bent_fold` is long enough for tile schedules to be bent.
    """
    rng = random.Random(f"{name} {seed}")
    long = name == "bent_fold" and seed % 2 == 1
    bands = [Band(), Band(0), Band(0, None, "bottom_right"), Band(0, 9), Band(-3, 20), Band(None, 5)]
    able = [band for band in bands if supports(name, band) is None]
    q_len, block_q = (rng.randint(LEAST, LEAST + 30), 1) if long else (rng.randint(1, 40), rng.choice((1, 4)))
    problem = Problem(
        rng.choice(able), q_len, rng.randint(1, q_len if long else 40), block_q, rng.choice((2, 4)),
        batch=rng.randint(1, 3), heads=rng.randint(1, 5), head_chunk=rng.choice((1, 2, 5, 64)),
    )  # fmt: skip
    number = problem.batch * (problem.heads if by_head else 1)
    return Tables(name, problem, [within(problem, random_pairs(rng, problem.n_q, problem.n_kv)) for _ in range(number)])


@pytest.mark.parametrize("by_head", [False, True], ids=["by batch element", "by head"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_random_tables_are_valid(name: str, by_head: bool) -> None:
    """Each visible pair once, ranks without holes, and every wait for an earlier work id."""
    for seed in range(25):
        assert check_tables(random_tables(seed, name, by_head=by_head)) == [], seed


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("workers", [1, 2, 7])
def test_any_number_of_workers_finishes(name: str, workers: int) -> None:
    for seed in range(10):
        assert not simulate(jobs_of(random_tables(seed, name)), workers).unfinished, seed


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_mask_that_hides_nothing_has_the_tile_schedule_of_its_band(name: str) -> None:
    for seed in range(10):
        problem = random_tables(seed, name).problem
        closed = ClosedForm(name, problem)
        everything = within(problem, [[FULL] * problem.n_kv] * problem.n_q)
        tile_schedule = Tables(name, problem, [everything] * problem.batch)
        assert jobs_of(tile_schedule) == jobs_of(closed), seed


def test_a_batch_element_is_a_function_of_its_own_mask() -> None:
    """Alone and in any batch: the same tile schedules and ranks."""
    for name in SCHEDULES:
        for seed in range(10):
            tile_schedule = random_tables(seed, name)
            for b, pairs in enumerate(tile_schedule.pairs):
                alone = Tables(name, replace(tile_schedule.problem, batch=1), [pairs])
                for h in range(tile_schedule.problem.heads):
                    for kv in range(tile_schedule.problem.n_kv):
                        assert tile_schedule.packed_tiles(
                            b * tile_schedule.problem.heads + h, kv
                        ) == alone.packed_tiles(h, kv), (
                            name,
                            seed,
                        )


def placed(name: str, before: int, after: int) -> tuple[list[list[int]], list[list[int]]]:
    """The tile schedules and the contributors of a document of 40 kv tiles among so many of others, counted from its
    first.
    """
    n_kv = before + 40 + after
    seen = [[EMPTY] * n_kv for _ in range(2 * n_kv)]
    for first, end in ((0, before), (before, before + 40), (before + 40, n_kv)):
        for kv in range(first, end):
            for q in range(2 * kv, 2 * end):
                seen[q][kv] = FULL
    tile_schedule = Tables(name, Problem(Band(0), 2 * n_kv, 2 * n_kv, 1, 2, heads=2), [seen])
    tile_schedules, contributors = [], []
    for head in (0, 1):
        tile_schedules += [
            [q - 2 * before for q in tile_schedule.tile_schedule(head, kv)] for kv in range(before, before + 40)
        ]
        for q in range(2 * before, 2 * (before + 40)):
            kvs = sorted(tile_schedule.visible(head, q), key=lambda kv: tile_schedule.rank(head, q, kv))
            contributors.append([kv - before for kv in kvs])
    return tile_schedules, contributors


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_document_has_the_same_tile_schedules_wherever_it_lies(name: str) -> None:
    """Under all schedules but the bent fold, which knows how long the sequence is; and in both heads."""
    alone = placed(name, 0, 0)
    assert [placed(name, 7, 0) == alone, placed(name, 0, 30) == alone, placed(name, 50, 9) == alone] == [
        name != "bent_fold"
    ] * 3
    tile_schedules, contributors = alone
    assert (tile_schedules[:40], contributors[:80]) == (tile_schedules[40:], contributors[80:])


def full(n_q: int, n_kv: int) -> Tables:
    return Tables("ascending", Problem(Band(), n_q, n_kv, 1, 1), [[[FULL] * n_kv] * n_q])


def test_a_wait_for_a_later_work_id_is_caught() -> None:
    """Negative control: two kv tiles of one head, that share a q tile, trade work ids."""
    tile_schedule = full(4, 3)
    jobs = jobs_of(tile_schedule)
    swapped = (replace(jobs[1], work_id=0), replace(jobs[0], work_id=1), jobs[2])
    assert backward_wait(swapped) is not None
    assert any("waits for work id" in fault for fault in check_tables(tile_schedule, swapped))
    assert simulate(swapped, 1).unfinished


def test_a_missing_pair_is_caught() -> None:
    tile_schedule = full(4, 3)
    first, *others = jobs_of(tile_schedule)
    shorter = replace(first, columns=(replace(first.columns[0], steps=first.columns[0].steps[1:]),))
    assert len(check_tables(tile_schedule, [shorter, *others])) == 2  # a pair is missing, and so is a rank


def test_pairs_of_a_mask() -> None:
    """The classification of random masks never shows what the band hides, so that the tile schedule has all of it."""
    rng = random.Random(0)
    for _ in range(20):
        mask = random_mask(rng, 40)
        problem = Problem(mask.band, mask.q_len, mask.kv_len, 4, 8, batch=mask.batch)
        pairs = mask.pairs(4, 8)
        assert [within(problem, element) for element in pairs] == pairs
        assert check_tables(Tables("spt", problem, pairs)) == []


def test_packed_tiles() -> None:
    assert packed_tile(3, 5, False) == 3 | 5 << 15
    assert packed_tile(3, 5, True) == 3 | 5 << 15 | 1 << 30
    assert packed_tile(2**15 - 1, 2**15 - 1, True) < 2**31
    assert packed_tile(3, 5, True, True) == packed_tile(3, 5, True) - 2**31
    assert packed_tile(2**15 - 1, 2**15 - 1, True, True) == -1


FORWARD: list[tuple[list[list[int]], list[int]]] = [
    ([[FULL, PARTIAL, EMPTY], [EMPTY, FULL, EMPTY]], [1 | PARTIAL << 16 | FULL << 18, 0 | FULL << 16]),
    ([[EMPTY, EMPTY], [EMPTY, EMPTY]], [1 | PARTIAL << 16 | PARTIAL << 18]),
    ([[FULL, EMPTY], [EMPTY, EMPTY], [EMPTY, FULL]], [1 | PARTIAL << 18 | FULL << 20, 0 | FULL << 16]),
]


@pytest.mark.parametrize(("kinds", "packed_tiles"), FORWARD)
def test_packed_tiles_of_a_forward(kinds: Sequence[Sequence[int]], packed_tiles: list[int]) -> None:
    """From the last kv tile to the first; a row block that sees nothing has one step."""
    assert forward_packed_tiles(kinds, PARTIAL) == packed_tiles
    for kv in range(len(kinds[0])):
        flagged = [packed_tile | (packed_tile & 0xFFFF == kv) << 22 for packed_tile in packed_tiles]
        assert forward_packed_tiles(kinds, PARTIAL, {kv}) == flagged


REFUSED = [
    ("shift", Band(), [[[FULL] * 3] * 4], "schedule='shift' is not allowed: expected a launch-ordered schedule"),
    ("two_pass", Band(), [[[FULL] * 3] * 4], "schedule='two_pass'"),
    ("symmetric_shift", Band(0), [[[EMPTY] * 3] * 4], "schedule='symmetric_shift'"),
    ("spt", Band(), [[[FULL] * 2] * 4], "pairs"),
    ("spt", Band(), [[[FULL] * 3] * 4] * 2, "pairs"),
]


@pytest.mark.parametrize(("name", "band", "pairs", "message"), REFUSED)
def test_what_is_refused(name: str, band: Band, pairs: list[Pairs], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Tables(name, Problem(band, 4, 3, 1, 1), pairs)


def test_too_many_tiles() -> None:
    with pytest.raises(ArgumentError, match="q tiles=32769 is not allowed: expected at most 32768"):
        Tables("spt", Problem(Band(), 32769, 1, 1, 1), [[[FULL]] * 32769])


def test_full_pairs_have_a_complete_kv_tile() -> None:
    pairs = tile_pairs(lambda i, j: True, 5, 5, 4, 4)
    assert pairs == [[FULL, PARTIAL], [FULL, PARTIAL]]
