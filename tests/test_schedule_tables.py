"""The bent fold of masks that are data: right, live, a function of each batch element alone, and fast in the model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dash_inductor.errors import ArgumentError
from dash_inductor.model import Band, Site
from dash_inductor.planning import plan
from dash_inductor.schedule.jobs import Job, jobs_of, tables
from dash_inductor.schedule.schedules import supports
from dash_inductor.schedule.simulator import Costs, simulate
from dash_inductor.schedule.table_walk import LEAST, BentFold, Tables, bent, entry, section_of
from dash_inductor.schedule.validity import backward_wait, check_tables
from dash_inductor.schedule.visibility import EMPTY, FULL, PARTIAL, sees, tile_pairs
from dash_inductor.schedule.walk import ClosedForm, Problem
from tests.support.calls import call_of
from tests.support.tile_pairs import BANDS, documents, of_rule, random_mask, random_pairs

SEEDS = range(300)


def random_tables(seed: int) -> Tables:
    """Up to five batch elements of any tile pairs, some of them large enough to be folded."""
    rng = random.Random(seed)
    n_q, n_kv = (rng.choice((rng.randint(1, 12), rng.randint(33, 80))) for _ in range(2))
    elements = [random_pairs(rng, n_q, n_kv) for _ in range(rng.randint(1, 5))]
    return Tables(elements, heads=rng.randint(1, 5), section=rng.choice((1, 2, 3, 7, 100)))


def test_any_tables_are_right_and_live() -> None:
    """Every visible pair once, ranks 0 .. n-1, and no wait for a later ticket; hundreds of random tables."""
    folded = 0
    for seed in SEEDS:
        walk = random_tables(seed)
        assert check_tables(walk) == [], seed
        folded += any(0 in fold.phase for fold in walk.folds)
    assert folded > 50, "hardly any of the tables has a long kv tile"


@pytest.mark.parametrize("seed", range(60))
def test_tables_of_masks_are_right_and_live(seed: int) -> None:
    rng = random.Random(seed)
    mask = random_mask(rng, 80)
    walk = Tables(mask.pairs(rng.choice((1, 2, 8)), rng.choice((1, 4, 16))), heads=2, section=rng.randint(1, 9))
    assert check_tables(walk) == []


def test_one_worker_is_enough() -> None:
    for seed in (0, 1, 2, 3):
        walk = random_tables(seed)
        assert (walk.co_resident, walk.resident) == (False, 1)
        assert not simulate(jobs_of(walk), 1).unfinished


def test_a_swap_in_launch_order_is_caught() -> None:
    """Negative control: two kv tiles of one head, that share a q tile, trade tickets."""
    walk = Tables([of_rule(4, 3, lambda q, kv: True)])
    jobs = jobs_of(walk)
    swapped = (replace(jobs[1], ticket=0), replace(jobs[0], ticket=1), jobs[2])
    assert backward_wait(swapped) is not None
    assert any("waits for ticket" in fault for fault in check_tables(walk, swapped))
    assert simulate(swapped, 1).unfinished


def test_a_missing_pair_is_caught() -> None:
    walk = Tables([of_rule(4, 3, lambda q, kv: True)])
    first, *others = jobs_of(walk)
    shorter = replace(first, columns=(replace(first.columns[0], steps=first.columns[0].steps[1:]),))
    assert len(check_tables(walk, [shorter, *others])) == 2  # a pair is missing, and so is a rank


def steps(walk: Tables, b: int, h: int) -> list[object]:
    """All that reaches a bit of one head: entries and contributions."""
    head = b * walk.heads + h
    return [walk.entries(head, kv) for kv in range(walk.n_kv)] + [walk.contributions(head, q) for q in range(walk.n_q)]


def order_of(walk: Tables, b: int, h: int) -> list[int]:
    return [kv for at, head, kv in walk.order if (at, head) == (b, h)]


def test_a_batch_element_is_a_function_of_its_own_mask() -> None:
    """Alone, in any batch, with any number of heads and any section: the same order, walks and ranks."""
    for seed in range(80):
        walk = random_tables(seed)
        for b, pairs in enumerate(walk.pairs):
            alone = Tables([pairs])
            for h in range(walk.heads):
                assert steps(walk, b, h) == steps(alone, 0, 0), (seed, b, h)
                assert order_of(walk, b, h) == order_of(alone, 0, 0), (seed, b, h)


def test_members_of_a_group_are_launched_in_their_order() -> None:
    """Heads that share a kv tile take ascending tickets, for every section: sums over members wait backwards."""
    for seed in range(80):
        walk = random_tables(seed)
        last: dict[tuple[int, int], int] = {}
        for b, h, kv in walk.order:
            assert last.get((b, kv), -1) < h, seed
            last[b, kv] = h


def test_order_in_words() -> None:
    """Long kv tiles shortest first, then the others longest first; what nobody sees comes last."""
    n = 40
    causal = BentFold(of_rule(n, n + 1, lambda q, kv: kv <= q))
    assert causal.order == [*range(19, -1, -1), *range(20, n), n]
    assert causal.phase == [0] * 20 + [1] * 21
    assert BentFold(of_rule(LEAST - 1, 40, lambda q, kv: kv <= q)).order == list(range(40))  # too short to be folded
    lower = causal.walk[10]
    assert lower == [*range(10, 19), *range(39, 18, -1)]
    assert causal.walk[30] == list(range(39, 29, -1))
    assert causal.walk[n] == []


@pytest.mark.parametrize(("n", "width"), [(40, 20), (40, 15), (60, 31), (33, 60), (50, 3)])
def test_windows_in_words(n: int, width: int) -> None:
    """A causal window of whole kv tiles, with two q tiles in each: the rule stated for it alone."""
    fold = BentFold(of_rule(2 * n, n, lambda q, kv: kv <= q // 2 <= kv + width))
    longest = 2 * min(width + 1, n)
    long = sum(4 * min(width + 1, n - kv) > longest for kv in range(n)) if longest >= LEAST else 0
    assert fold.order == [*range(long - 1, -1, -1), *range(long, n)]
    for kv in range(n):
        tiles = range(2 * kv, min(2 * n, 2 * (kv + width + 1)))
        shared = [q for q in tiles if q // 2 >= long - 1]  # with every long kv tile that has come before
        for q in tiles:
            first = max(0, q // 2 - width)
            assert fold.rank[kv][q] == (min(q // 2 + 1, long) - 1 - kv if kv < long else kv - first)
        if kv >= long:
            assert fold.walk[kv] == [*reversed(tiles)]
        elif 4 * len(shared) >= len(tiles):
            assert fold.walk[kv] == [*range(2 * kv, shared[0]), *reversed(shared)]
        else:
            assert fold.walk[kv] == [*tiles]


def test_walks_in_words() -> None:
    up, down = list(range(8)), list(range(7, -1, -1))
    assert bent(up, [0] * 8) == down
    assert bent(up, [0, 1, 2, 3, 4, 5, 6, 7]) == up
    assert bent(up, [0, 1, 2, 3, 4, 5, 6, 5]) == down
    assert bent(up, [0, 1, 2, 3, 4, 4, 4, 4]) == [0, 1, 2, 3, 7, 6, 5, 4]
    assert bent(up, [0, 0, 0, 0, 0, 0, 0, 1]) == [6, 5, 4, 3, 2, 1, 0, 7]
    assert bent([3, 5, 9], [2, 2, 4]) == [3, 5, 9]
    assert bent([], []) == []


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_visibility_is_that_of_the_closed_forms(band: Band) -> None:
    """Tile pairs counted from elements, and `geometry`'s closed forms: visible, and in need of a mask."""
    for q_len, kv_len, block_q, block_kv in ((33, 33, 4, 8), (40, 21, 8, 4), (17, 50, 5, 3), (1, 9, 2, 2)):
        problem = Problem(band, q_len, kv_len, block_q, block_kv)
        closed = ClosedForm("ascending", problem)
        walk = Tables([tile_pairs(sees(band, q_len, kv_len), q_len, kv_len, block_q, block_kv)])
        for q in range(problem.n_q):
            assert list(walk.visible(0, q)) == list(closed.visible(0, q))
            for kv in walk.visible(0, q):
                assert walk.needs_mask(0, q, kv) == closed.needs_mask(0, q, kv), (problem, q, kv)


def test_visibility_of_vectors() -> None:
    """By hand: padding hides keys, segments hide other documents, and a hole in a tile leaves it partial."""
    valid, ids = [True] * 5 + [False] * 3, [4, 4, 4, 4, -1, -1, 4, 4]
    keys = tile_pairs(sees(Band(), 4, 8, valid), 4, 8, 2, 2)
    assert keys == [[FULL, FULL, PARTIAL, EMPTY]] * 2
    documents = tile_pairs(sees(Band(), 8, 8, None, (ids, ids)), 8, 8, 2, 2)
    assert documents == [[FULL, FULL, EMPTY, FULL]] * 2 + [[EMPTY, EMPTY, FULL, EMPTY]] + [[FULL, FULL, EMPTY, FULL]]
    assert tile_pairs(sees(Band(), 3, 3), 3, 3, 2, 2) == [[FULL, PARTIAL]] * 2  # the last kv tile is not complete


@pytest.mark.parametrize(
    ("vectors", "name"),
    [
        ((None, ([0] * 3, [0] * 4)), "segments\\[0\\]"),
        (([True] * 5, None), "valid"),
        ((None, ([0] * 4, [])), "segments\\[1\\]"),
    ],
)
def test_vectors_of_another_length_are_named(vectors: tuple[object, object], name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}=[035] is not allowed: expected 4"):
        sees(Band(), 4, 4, *vectors)  # type: ignore[arg-type]  # lists of the wrong length


def test_what_tables_cannot_be_made_of() -> None:
    small = of_rule(2, 2, lambda q, kv: True)
    for pairs in ([], [[]], [[[]]], [small, of_rule(2, 3, lambda q, kv: True)], [[[0], [0, 1]]]):
        with pytest.raises(ArgumentError, match="pairs="):
            Tables(pairs)
    with pytest.raises(ArgumentError, match="heads=0"):
        Tables([small], heads=0)
    with pytest.raises(ArgumentError, match="section=0"):
        Tables([small], section=0)
    with pytest.raises(ArgumentError, match=r"q tiles=32769 is not allowed: expected at most 32768"):
        Tables([[[FULL]] * 32769])


def test_entries() -> None:
    assert entry(3, 5, True) == 3 + 5 * 2**15 + 2**30
    assert 0 <= entry(2**15 - 1, 2**15 - 1, True) < 2**31  # an int32
    walk = Tables([[[PARTIAL, EMPTY], [FULL, FULL]]])
    assert walk.entries(0, 0) == [entry(1, 0, False), entry(0, 0, True)]
    assert walk.entries(0, 1) == [entry(1, 1, False)]


# --------------------------------------------------------------------------------------------- against the time model

STEP, WORKERS = Costs(compute=2.18, reduce=0.57, handover=1.09, epilogue=8.7, depth=2), 132
"""An H200 at head dimension 128 with tiles of 64 x 128, in microseconds."""


def slowness(walk: Tables, jobs: tuple[Job, ...] | None = None) -> float:
    """Makespan over what no schedule of whole walks is faster than."""
    jobs = jobs_of(walk) if jobs is None else jobs
    times = [STEP.epilogue + STEP.compute * sum(len(c.steps) for c in job.columns) for job in jobs]
    return simulate(jobs, WORKERS, STEP).makespan / max(sum(times) / WORKERS, *times)


def folded(elements: list[list[list[int]]], heads: int, least: int = 2) -> float:
    section = section_of(len(elements) * heads, len(elements[0][0]), least, WORKERS)
    return slowness(Tables(elements, heads, section))


def causal(tokens: int) -> list[list[int]]:
    return documents(random.Random(0), [tokens], 64, 128)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "bound"), [(1, 16384, 2, 1.02), (1, 4096, 8, 1.05), (8, 2048, 16, 1.02)]
)
def test_causal_masks_cost_little(batch: int, tokens: int, heads: int, bound: float) -> None:
    """The published figures are 1.01, 1.03 and 1.01; straight walks lose up to a half."""
    assert folded([causal(tokens)] * batch, heads) < bound
    straight = Problem(
        Band(0), tokens, tokens, 64, 128, batch, heads, section=section_of(batch * heads, tokens // 128, 8, WORKERS)
    )
    assert slowness(Tables([causal(tokens)]), tables("spt", straight)) > bound + 0.02


@pytest.mark.parametrize("seed", range(3))
def test_packed_documents_cost_little(seed: int) -> None:
    """One giant among 15 documents, 16k tokens and 4 heads: 1.04 on average, 1.09 at worst."""
    rng = random.Random(seed)
    weights = [rng.uniform(0.2, 1) for _ in range(15)]
    lengths = [int(w / sum(weights) * 8192) for w in weights]
    lengths.insert(rng.randrange(15), 16384 - sum(lengths))
    assert folded([documents(rng, lengths, 64, 128)], 4) < 1.1


def test_padded_causal_masks_cost_little() -> None:
    elements = [
        of_rule(64, 32, lambda q, kv, valid=valid: kv <= q // 2 and kv * 128 < valid)  # type: ignore[misc]  # a default
        for valid in (4096, 3000, 1200, 700)
    ]
    assert folded(elements, 16) < 1.05


def test_uneven_columns_cost_little() -> None:
    """Any tile pairs, denser in some columns: 1.03, where SPT takes 2.2."""
    rng = random.Random(0)
    weights = [rng.lognormvariate(0, 1) * 0.2 for _ in range(128)]
    noise = [[rng.random() for _ in range(128)] for _ in range(256)]
    pairs = of_rule(256, 128, lambda q, kv: noise[q][kv] < weights[kv])
    walk = Tables([pairs], 16, section_of(16, 128, 8, WORKERS))
    assert slowness(walk) < 1.06


# ------------------------------------------------------------------------------------- the closed form of the bent fold

LOWER = Band(0), Band(), Band(0, None, "bottom_right"), Band(7), Band(-9), Band(33, None, "bottom_right"), Band(500)
SHAPES = (1, 1), (1, 2), (2, 1), (3, 2), (2, 4)


def same_as_tables(problem: Problem) -> None:
    """The same tickets, walks and ranks as counted from the tile pairs of the band."""
    closed = ClosedForm("bent_fold", problem)
    pairs = of_rule(problem.n_q, problem.n_kv, lambda q, kv: kv in closed.visible(0, q))
    counted = Tables([pairs] * problem.batch, problem.heads, problem.section)
    assert jobs_of(closed) == jobs_of(counted), problem


def test_closed_form_at_every_pair_of_counts() -> None:
    """All (n_q, n_kv) up to 40 x 40, with bands, tile shapes, ragged lengths, heads and sections in turn."""
    rng = random.Random(0)
    for n_q in range(1, 41):
        for n_kv in range(1, 41):
            band, (block_q, block_kv) = LOWER[(n_q + n_kv) % len(LOWER)], SHAPES[(2 * n_q + n_kv) % len(SHAPES)]
            q_len, kv_len = n_q * block_q - rng.randrange(block_q), n_kv * block_kv - rng.randrange(block_kv)
            same_as_tables(
                Problem(band, q_len, kv_len, block_q, block_kv, heads=rng.randint(1, 3), section=rng.randint(1, 4))
            )


@pytest.mark.parametrize("band", LOWER, ids=str)
def test_closed_form_where_walks_are_long(band: Band) -> None:
    rng = random.Random(str(band))
    for block_q, block_kv in SHAPES:
        for _ in range(6):
            q_len = rng.randint(LEAST * block_q, 90 * block_q)
            kv_len = q_len if rng.random() < 0.5 else rng.randint(1, 90 * block_kv)
            same_as_tables(Problem(band, q_len, kv_len, block_q, block_kv, heads=2, section=rng.randint(1, 5)))


def test_closed_form_with_a_batch() -> None:
    """Sections of a batch group other pairs than `Tables`, so tickets differ: walks and the order of a head do not."""
    problem = Problem(Band(0), 160, 150, 2, 4, batch=3, heads=2, section=4)
    closed = jobs_of(ClosedForm("bent_fold", problem))
    counted = jobs_of(ClosedForm("bent_fold", replace(problem, batch=1, heads=1)))
    for head in range(6):
        assert [job.columns for job in closed if job.head == head] == [job.columns for job in counted]


def test_the_bent_fold_is_planned_only_where_it_is_named() -> None:
    facts = Site("cuda", "bfloat16", 8, 16, 16, 2048, 2048, 128, 128, call_of(Band(0), 1.0))
    for band, schedule in ((Band(0), "fold"), (Band(-5), "fold"), (Band(0, 1023), "fold"), (Band(), "ascending")):
        for dim in (64, 128, 256):
            site = replace(facts, head_dim=dim, value_dim=dim, call=call_of(band, 1.0))
            assert plan(site, "sm_90").schedule == schedule
    assert plan(facts, "sm_90", "bent_fold").schedule == "bent_fold"
    assert supports("bent_fold", Band(0, 5)) == "bent_fold needs a mask without upper bound on i - j"
