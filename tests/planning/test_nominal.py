"""Critical paths made in advance: they are the simulator's, and choices need nothing else."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_inductor.kernels.family import Candidate
from dash_inductor.kernels.hopper.kernel_configs import CANDIDATES as HOPPER
from dash_inductor.model import AttentionSpec, Band, Mask, Plan, Site
from dash_inductor.model.site import NOMINAL_LEN
from dash_inductor.planning import nominal, plan, planner
from dash_inductor.planning.nominal import ARCH, SCHEDULES, Reach
from dash_inductor.schedule import simulator
from dash_inductor.schedule.names import CO_RESIDENT, NAMES, UNBOUNDED, supports
from dash_inductor.schedule.problem import Problem
from dash_inductor.schedule.schedules import LEAST, define
from dash_inductor.schedule.tile_schedule import ClosedForm, functions
from tests.support.processes import run_python
from tests.support.schedules import names_for, problems

CANDIDATES = list(dict.fromkeys(HOPPER.values()))
MASKS = (
    "full", "causal", "causal:bottom_right", "band(0,1023)", "band(-64,64)", "band(-512,511)", "band(none,0)",
    "band(-5000,5000)", "keys(0)", "dense(0)", "causal & segments(0,0)", "segments(0,0)",
)  # fmt: skip
HARDWARE = (
    ("sm_90", "bfloat16"), ("sm_90", "float32"), ("sm_80", "bfloat16"), ("sm_120", "float16"), ("sm_100", "bfloat16"),
    ("cpu", "float32"),
)  # fmt: skip


def site(mask: str, head_dim: int, value_dim: int | None = None, dtype: str = "bfloat16", device: str = "cuda") -> Site:
    spec = AttentionSpec(Mask.parse(mask), 0.125)
    return Site(device, dtype, 2, 8, 2, 4096, 4096, head_dim, value_dim or head_dim, spec)  # type: ignore[arg-type]


class Simulated(Exception):
    pass


@pytest.fixture
def no_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(*args: object) -> None:
        raise Simulated

    monkeypatch.setattr(simulator, "simulate", simulate)
    planner._choose.cache_clear()


@pytest.mark.usefixtures("no_simulation")
@pytest.mark.parametrize("mask", MASKS)
def test_no_choice_is_simulated(mask: str) -> None:
    for (arch, dtype), dims in itertools.product(HARDWARE, ((32, 32), (64, 64), (128, 128), (192, 128), (256, 256))):
        if dims[0] <= 128 or (arch, dtype) == ("sm_90", "bfloat16"):
            plan(site(mask, *dims, dtype=dtype, device="cpu" if arch == "cpu" else "cuda"), arch)


@pytest.mark.usefixtures("no_simulation")
def test_the_schedules_of_choices_are_not_simulated_where_they_are_named() -> None:
    for name in (*SCHEDULES, "bent_fold"):
        assert plan(site("causal", 128), "sm_90", name).schedule == name
    for mask, name in (("causal", "descending"), ("full", "shift"), ("band(300,900)", None)):
        with pytest.raises(Simulated):
            plan(site(mask, 128), "sm_90", name)


def test_a_first_plan_imports_neither_sympy_nor_the_tile_schedules() -> None:
    """Bands beside the diagonal, which are simulated, show that the assertion can fail."""
    program = (
        "import sys\n"
        "from dash_inductor.model import AttentionSpec, Mask, Site\n"
        "from dash_inductor.planning import plan\n"
        "def loaded(mask):\n"
        "    spec = AttentionSpec(Mask.parse(mask), 0.125)\n"
        "    plan(Site('cuda', 'bfloat16', 2, 8, 2, 4096, 4096, 64, 64, spec), 'sm_90')\n"
        "    names = 'sympy', 'dash_inductor.schedule.tile_schedule', 'torch'\n"
        "    return [name for name in names if name in sys.modules]\n"
        "print(loaded('causal'), loaded('band(-64,64)'), loaded('band(300,900)'))"
    )
    found = run_python(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout.strip()
    assert found == "[] [] ['sympy', 'dash_inductor.schedule.tile_schedule']"


def compare(name: str, candidate: Candidate, reach: Reach) -> None:
    band = reach.band(candidate.dkdv)
    assert nominal.made_in_advance(name, candidate, band, ARCH) == nominal.simulated(name, candidate, band, ARCH), (
        name, nominal.key(candidate), reach,
    )  # fmt: skip


def test_what_is_made_in_advance_is_simulated() -> None:
    """If this fails, run ``python tools/critical_paths.py``."""
    wide, narrow = HOPPER[64, 64], HOPPER[256, 256]
    for name in SCHEDULES:
        compare(name, wide, Reach(0, 3))
    compare("spt", narrow, Reach(0, nominal.farthest(narrow.dkdv).above))
    compare("ascending", HOPPER[192, 128], Reach(17, 2))


@pytest.mark.parametrize("candidate", CANDIDATES, ids=nominal.key)
@pytest.mark.parametrize("band", [Band(0), Band(-700)], ids=str)
def test_the_bent_fold_of_the_nominal_problem_is_spt(
    band: Band, candidate: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `made_in_advance` says; not so if the nominal sequences were long enough to be bent."""
    found = {nominal.simulated(name, candidate, band, ARCH) for name in ("bent_fold", "spt")}
    assert found == {nominal.made_in_advance("bent_fold", candidate, band, ARCH)}
    monkeypatch.setattr(nominal, "NOMINAL_LEN", LEAST * candidate.dkdv.block_q)
    monkeypatch.setattr(nominal, "NOMINAL_BATCH", 1)  # less to simulate
    assert len({nominal.simulated(name, candidate, band, ARCH) for name in ("bent_fold", "spt")}) == 2


@pytest.mark.full
def test_more_of_what_is_made_in_advance_is_simulated() -> None:
    rng = random.Random(0)
    for _ in range(400):
        candidate = rng.choice(CANDIDATES)
        most = nominal.farthest(candidate.dkdv)
        compare(rng.choice(SCHEDULES), candidate, Reach(rng.randint(0, most.below), rng.randint(0, most.above)))


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_every_band_that_contains_the_diagonal_is_there(candidate: Candidate) -> None:
    most = nominal.farthest(candidate.dkdv)
    for name in SCHEDULES:
        rows = nominal._made_in_advance()[nominal.key(candidate)][name]
        assert [len(row) for row in rows] == [most.above + 1] * (most.below + 1)


def test_other_costs_and_other_nominal_problems_have_no_critical_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = HOPPER[128, 128]
    assert nominal.made_in_advance("bent_fold", candidate, Band(0), ARCH) is not None
    assert nominal.made_in_advance("bent_fold", candidate, Band(0), "sm_100") is None
    assert nominal.made_in_advance("bent_fold", candidate, Band(200, 300), ARCH) is None
    assert nominal.made_in_advance("bent_fold", candidate, Band(0, 9), ARCH) is None
    assert nominal.made_in_advance("descending", candidate, Band(0), ARCH) is None
    dearer = Candidate(candidate.dkdv, matmul=0.3, reduce=0.3, handover=0.3, depth=2)
    assert nominal.made_in_advance("bent_fold", dearer, Band(0), ARCH) is None
    monkeypatch.setattr(nominal, "NOMINAL_LEN", 512)
    assert nominal.made_in_advance("bent_fold", candidate, Band(0), ARCH) is None


BOUNDS = st.one_of(st.none(), st.integers(0, 5000))


@given(st.sampled_from(CANDIDATES), BOUNDS, BOUNDS)
@settings(max_examples=40)
def test_bands_of_equal_reach_have_the_same_tile_pairs(
    candidate: Candidate, ahead: int | None, back: int | None
) -> None:
    """Hence they have the same tile schedules and ranks, which are made of these ranges."""
    band, tiles = Band(None if ahead is None else -ahead, back), candidate.dkdv
    reach = Reach.of(band, tiles)
    assert reach is not None
    found = []
    for each in (band, reach.band(tiles)):
        problem = Problem(each, NOMINAL_LEN, NOMINAL_LEN, tiles.block_q, tiles.block_kv)
        f, tail = functions("ascending", problem), problem.tail()
        ranges = [f.dash_q_range(kv, *tail) for kv in range(problem.n_kv)]
        ranges += [f.dash_kv_range(q, *tail) for q in range(problem.n_q)]
        found.append([(first, end) for first, _, _, end in ranges])
    assert found[0] == found[1]


@given(problems())
@settings(max_examples=60)
def test_steps_are_the_visits_of_every_schedule(problem: Problem) -> None:
    steps = [problem.steps(kv) for kv in range(problem.n_kv)]
    for name in names_for(problem):
        tile_schedule = ClosedForm(name, problem)
        assert steps == [tile_schedule.visits(0, kv) for kv in range(problem.n_kv)]


def test_what_is_said_of_names_is_true_of_the_schedules() -> None:
    for name in NAMES:
        assert (supports(name, Band(0, 9)) is None) == (name not in ("shift", *UNBOUNDED))
        assert (define(name, Band()).resident is not None) == (name in CO_RESIDENT)
        assert nominal.waits(name, ARCH) == define(name, Band()).shared_accumulator


def choices(masks: tuple[str, ...], dims: tuple[tuple[int, int], ...]) -> list[Plan]:
    planner._choose.cache_clear()
    return [plan(site(mask, *d), "sm_90") for mask in masks for d in dims]


def check_choices(monkeypatch: pytest.MonkeyPatch, masks: tuple[str, ...], dims: tuple[tuple[int, int], ...]) -> None:
    found = choices(masks, dims)
    monkeypatch.setattr(nominal, "made_in_advance", lambda *args: None)
    assert choices(masks, dims) == found


def test_choices_are_those_of_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    check_choices(monkeypatch, ("causal", "band(-500,400)"), ((64, 64),))


@pytest.mark.full
def test_all_choices_are_those_of_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    check_choices(monkeypatch, MASKS, ((64, 64), (128, 128), (192, 128), (256, 256)))
