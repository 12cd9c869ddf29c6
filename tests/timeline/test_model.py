"""Timelines: what is a bar, simulated runs of schedules and plans, masks that are data, recorded runs, text."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.hopper.calibration import CALIBRATIONS
from dash_inductor.model.architectures import WORKERS
from dash_inductor.model.attention_spec import AttentionSpec
from dash_inductor.model.components import Keys, Operand, Segments
from dash_inductor.model.mask import Band, Mask
from dash_inductor.model.site import Site
from dash_inductor.planning import planner
from dash_inductor.planning.ranking import chosen_of, rank
from dash_inductor.schedule.jobs import jobs_of, tables
from dash_inductor.schedule.simulator import Costs
from dash_inductor.schedule.table_tile_schedule import Tables
from dash_inductor.schedule.tile_schedule import Problem
from dash_inductor.schedule.visibility import EMPTY, sees, tile_pairs
from dash_inductor.timeline import measured, planned, simulated
from dash_inductor.timeline.lengths import Lengths, restricted
from dash_inductor.timeline.model import MICROSECONDS, Picture, Step, Timeline, ticks
from dash_inductor.timeline.simulated import MODEL_UNIT, of_plan, timeline
from dash_inductor.timeline.text import text

FULL, CAUSAL = Band(), Band(0)
PAPER = Costs(1.0, 0.5)
SITE = Site("cuda", "bfloat16", 2, 4, 2, 512, 512, 128, 128, AttentionSpec(Mask(CAUSAL), 1.0))


def small(name: str, band: Band, costs: Costs = PAPER, heads: int = 2) -> Timeline:
    return timeline(name, Problem(band, 4, 4, 1, 1, heads=heads), 4, costs)


@pytest.mark.parametrize(
    ("name", "band", "end"),
    [
        ("ascending", FULL, 2 * 4 * 1.5 + 3 * 0.5),
        ("shift", FULL, 2 * 4 * 1.5),
        ("ascending", CAUSAL, 2 * 4 * 1.5 + 3 * 0.5),
        ("descending", CAUSAL, 2 * 5 * 1.5 / 2 + 3 * 0.5),
        ("symmetric_shift", CAUSAL, 2 * 5 * 1.5 / 2),
    ],
)
def test_small_examples_take_as_long_as_the_paper_says(name: str, band: Band, end: float) -> None:
    """Two heads of four tiles on four workers: m n (c + r), or half of m (n + 1) (c + r), and (n - 1) r of stagger."""
    run = small(name, band)
    assert run.end == end
    assert len(run.steps) == 2 * (16 if band.is_full else 10)


def test_bars_of_a_lane_without_writer() -> None:
    bars = [(bar.kind, bar.begin, bar.end) for bar in small("ascending", CAUSAL, heads=1).bars if bar.track == 0]
    # Worker 1 has kv tile 1: its first addition is the second one to q tile 1, after worker 0 has come there.
    assert bars[8:11] == [("compute", 0.0, 1.0), ("wait", 1.0, 2.5 + 0.5), ("add", 3.0, 3.5)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_bars_of_a_track_do_not_overlap_and_cover_what_steps_say(depth: int) -> None:
    run = timeline("ascending", Problem(CAUSAL, 12, 12, 1, 1, heads=3), 5, Costs(1.0, 1.5, 0.2, 0.5, depth))
    assert run.writer == bool(depth)
    free: dict[tuple[int, int], float] = {}
    time = {"compute": 0.0, "wait": 0.0, "add": 0.0}
    for bar in run.bars:
        key = run.steps[bar.step].lane, bar.track
        assert free.get(key, 0.0) <= bar.begin < bar.end <= run.end
        free[key] = bar.end
        time[bar.kind] += bar.end - bar.begin
    assert {track for _, track in free} == ({0, 1} if depth else {0})
    assert time["compute"] == pytest.approx(len(run.steps) * 1.0)
    assert time["add"] == pytest.approx(len(run.steps) * 1.5)
    assert time["wait"] > 0
    assert 0 < sum(run.shares.values()) <= 1


def test_a_cta_that_waits_for_a_buffer_is_drawn_as_waiting() -> None:
    run = timeline("ascending", Problem(FULL, 4, 1, 1, 1), 1, Costs(1.0, 3.0, depth=1))
    stalls = [bar for bar in run.bars if bar.kind == "wait" and bar.track == 0]
    assert [(bar.begin, bar.end) for bar in stalls] == [(2.0, 4.0), (5.0, 7.0)]
    assert not [bar for bar in timeline("ascending", Problem(FULL, 4, 1, 1, 1), 1, Costs(1.0, 1.0, depth=1)).bars
                if bar.kind == "wait"]  # fmt: skip


def test_text() -> None:
    assert text(small("shift", FULL, Costs(1.0, 1.0), 1), 16) == (
        "shift: 8 units · computes 50% · adds 50% · waits 0%\n"
        "   0  aa++aa++aa++aa++\n   1  aa++aa++aa++aa++\n   2  aa++aa++aa++aa++\n   3  aa++aa++aa++aa++\n"
    )
    waiting = text(small("ascending", CAUSAL, heads=1), 15).splitlines()
    assert waiting[4] == "   3  aa............+"
    stuck = timeline("shift", Problem(FULL, 2, 2, 1, 1), 1, Costs())
    assert "hangs on 1 workers: 2 CTAs never finish" in text(stuck)


def test_units() -> None:
    run = small("spt", CAUSAL)
    scaled = run.in_unit(MICROSECONDS, 10.0)
    assert (scaled.end, scaled.steps[3].write) == (run.end * 10, run.steps[3].write * 10)
    with pytest.raises(ArgumentError, match="one unit"):
        _ = Picture("", "", (run, scaled)).unit


@pytest.mark.parametrize(("end", "expected"), [(13.5, 7), (100.0, 11), (0.00097, 10), (7.0, 8), (0.0, 1)])
def test_ticks(end: float, expected: int) -> None:
    found = ticks(end)
    assert len(found) == expected
    assert found[0] == 0
    assert found[-1] <= end * 1.0001


# Plans at sites.


@pytest.mark.parametrize(("arch", "schedule"), [("sm_90", "bent_fold"), ("sm_90", "ascending"), ("sm_80", "spt")])
def test_the_run_of_a_plan_visits_the_tile_pairs_of_the_site(arch: str, schedule: str) -> None:
    """All query heads of all batch elements, and the tiles of the plan; more workers make it no longer."""
    plan = planner.plan(SITE, arch, schedule)
    run = of_plan(SITE, arch, plan)
    pairs = {(step.head, step.q, step.kv) for step in run.steps}
    assert len(pairs) == len(run.steps)
    bq, bkv = plan.dkdv.block_q, plan.dkdv.block_kv
    expected = {(h, q, kv) for h in range(8) for q in range(512 // bq) for kv in range(512 // bkv)
                if kv * bkv <= (q + 1) * bq - 1}  # fmt: skip
    assert pairs == expected
    assert len(run.lanes) == WORKERS[arch]
    assert run.heads[5] == "batch element 1, head 1"
    few = of_plan(SITE, arch, plan, workers=3)
    assert len(few.lanes) == 3
    assert few.end > run.end


def test_ctas_take_time_beside_their_steps_where_that_has_been_measured() -> None:
    def after_the_last_step(site: Site, arch: str, gpu: str) -> float:
        run = of_plan(site, arch, planner.plan(site, arch, "spt"), gpu=gpu)
        return run.end - max(step.written for step in run.steps)

    times = {gpu: after_the_last_step(SITE, "sm_90", gpu) for gpu in CALIBRATIONS}
    assert min(times.values()) > 0
    assert len(set(times.values())) == len(times)
    assert after_the_last_step(SITE, "sm_80", "H200") == 0
    assert (256, 256) not in CALIBRATIONS["H200"].backward
    assert after_the_last_step(replace(SITE, head_dim=256, value_dim=256), "sm_90", "H200") == 0


def test_query_heads_of_a_group_follow_one_another_on_a_portable_cta_and_have_ctas_of_their_own_on_hopper() -> None:
    def heads_of_a_cta(arch: str) -> set[frozenset[int]]:
        run = of_plan(SITE, arch, planner.plan(SITE, arch, "spt"))
        ctas: dict[int, set[int]] = {}
        for step in run.steps:
            ctas.setdefault(step.work_id, set()).add(step.head)
        return {frozenset(heads) for heads in ctas.values()}

    assert heads_of_a_cta("sm_80") == {frozenset({b + h, b + h + 1}) for b in (0, 4) for h in (0, 2)}
    assert heads_of_a_cta("sm_90") == {frozenset({h}) for h in range(8)}


def test_two_passes_are_drawn_one_after_the_other() -> None:
    """First dq, where every q tile of every query head has a CTA, the last ones first; then dk and dv."""
    site = replace(SITE, q_len=512, kv_len=256)
    plan = planner.plan(site, "sm_80", "two_pass")
    run = of_plan(site, "sm_80", plan)
    assert plan.dq is not None
    ctas, last = 8 * 512 // plan.dq.block_q, 512 // plan.dq.block_q - 1
    first, second = [s for s in run.steps if s.work_id < ctas], [s for s in run.steps if s.work_id >= ctas]
    assert max(s.written for s in first) <= min(s.start for s in second)
    assert max(s.written for s in second) == run.end
    assert not any(bar.kind == "wait" for bar in run.bars)
    assert {(s.work_id, s.head, s.q) for s in first if s.work_id < 2} == {(0, 0, last), (1, 1, last)}
    for steps, tiles in ((first, plan.dq), (second, plan.dkdv)):
        assert {(s.head, s.q, s.kv) for s in steps} == {
            (h, q, kv) for h in range(8) for q in range(512 // tiles.block_q) for kv in range(256 // tiles.block_kv)
            if kv * tiles.block_kv <= (q + 1) * tiles.block_q - 1
        }  # fmt: skip
        assert len({(s.head, s.q, s.kv) for s in steps}) == len(steps)


def test_what_cannot_be_drawn() -> None:
    plan = planner.plan(SITE, "sm_90")
    with pytest.raises(ArgumentError, match="dynamic"):
        of_plan(replace(SITE, q_len=None), "sm_90", plan)
    with pytest.raises(ArgumentError, match="tile pairs"):
        of_plan(replace(SITE, batch=64, q_len=8192, kv_len=8192), "sm_90", plan)
    with pytest.raises(ArgumentError, match="documents"):
        of_plan(SITE, "sm_90", plan, data=Lengths(documents=(500, 13)))


@pytest.mark.parametrize(
    "large", [{"q_len": 10**8, "kv_len": 10**8}, {"batch": 10**8}, {"q_heads": 10**8, "kv_heads": 1}]
)
@pytest.mark.parametrize("of_documents", [False, True])
def test_too_many_tile_pairs_are_not_even_counted(
    large: dict[str, int], of_documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of no schedule, with or without tables of the mask."""
    monkeypatch.setattr(simulated, "tables", lambda *given: pytest.fail("the tables are made"))
    site = replace(SITE, **large)
    data = Lengths(documents=(site.q_len or 0,)) if of_documents else None
    if of_documents:
        site = replace(site, spec=AttentionSpec(Mask(Band(0), Segments(Operand(0), Operand(0))), 1.0))
    for candidate in rank(site, "sm_90"):
        if candidate.plan is not None:
            with pytest.raises(ArgumentError, match=r"tile pairs='more than .*' is not allowed: expected at most"):
                of_plan(site, "sm_90", candidate.plan, data=data)


# Masks that are data.


@pytest.mark.parametrize("seed", range(6))
def test_tile_pairs_under_data_are_those_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    length, band = rng.randint(20, 60), rng.choice([FULL, CAUSAL, Band(0, 9), Band(-4, 4)])
    cuts = sorted(rng.sample(range(1, length), 3))
    documents = tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))
    valid = tuple(rng.randint(0, length) for _ in range(2))
    problem = Problem(band, length, length, 8, 4, batch=2)
    data = Lengths(documents if seed % 3 else None, valid if seed % 2 else None)
    ids = [i for i, count in enumerate(documents) for _ in range(count)]
    for b, seen in enumerate(data.seen(problem)):
        keys = [j < valid[b] for j in range(length)] if data.valid is not None else None
        of_element = sees(band, length, length, keys, (ids, ids) if data.documents is not None else None)
        expected = tile_pairs(of_element, length, length, 8, 4)
        assert [list(row) for row in seen] == [[pair != EMPTY for pair in row] for row in expected]


@pytest.mark.parametrize("name", ["ascending", "spt", "bent_fold", "descending"])
def test_restricted_jobs_are_those_of_the_tables(name: str) -> None:
    problem = Problem(CAUSAL, 40, 40, 4, 8, batch=2, heads=2)
    data = Lengths((13, 20, 7), (40, 25))
    seen = data.seen(problem)
    pairs = [[[int(pair) for pair in row] for row in element] for element in seen]
    found = restricted(tables(name, problem), seen, problem.heads)
    assert found == jobs_of(Tables(name, problem, pairs))
    assert found != tables(name, problem)


def test_a_plan_of_documents_visits_their_tile_pairs_alone() -> None:
    mask = Mask(CAUSAL, segments=Segments(Operand(0), Operand(0)))
    site = replace(SITE, spec=AttentionSpec(mask, 1.0))
    plan = planner.plan(site, "sm_90")
    whole, cut = of_plan(site, "sm_90", plan), of_plan(site, "sm_90", plan, data=Lengths(documents=(256, 256)))
    assert {(s.q, s.kv) for s in whole.steps} > {(s.q, s.kv) for s in cut.steps}
    assert not [s for s in cut.steps if s.q >= 4 and s.kv < 2]
    padded = replace(SITE, spec=AttentionSpec(Mask(FULL, keys=Keys(Operand(0))), 1.0))
    plan = planner.plan(padded, "sm_90")
    run = of_plan(padded, "sm_90", plan, data=Lengths(valid=(100, 512)))
    assert {s.kv for s in run.steps if s.head < 4} == {0}
    assert {s.kv for s in run.steps if s.head >= 4} == set(range(4))
    ranking = rank(padded, "sm_90")
    assert chosen_of(ranking).predicted_us is not None
    assert planned.picture(padded, "sm_90", ranking).unit == MICROSECONDS
    # Predictions are for valid keys alone.
    assert planned.picture(padded, "sm_90", ranking, data=Lengths(valid=(100, 512))).unit == simulated.PLAN_UNIT


# Pictures of rankings, and recorded runs.


def test_every_run_takes_as_long_as_predicted() -> None:
    site = replace(SITE, q_heads=16, kv_heads=16, q_len=2048, kv_len=2048)
    ranking = rank(site, "sm_90")
    found = planned.picture(site, "sm_90", ranking, draw=("bent_fold", "spt", "ascending", "two_pass"))
    assert found.unit == MICROSECONDS
    times = {c.schedule: c.predicted_us for c in ranking if c.kernel == "hopper"}
    for run in found.timelines:
        name = run.name.partition(",")[0]
        if run.name == name and times[name] is not None:
            assert run.end == pytest.approx(times[name])
        else:
            assert "not calibrated" in run.note
    assert [run.badge for run in found.timelines if run.name == chosen_of(ranking).schedule] == ["chosen"]
    assert sorted(run.name for run in found.timelines) == ["ascending", "bent_fold", "spt", "two_pass, portable"]
    few = planned.picture(site, "sm_90", ranking, draw=("bent_fold",), workers=9)
    assert few.unit == simulated.PLAN_UNIT  # predictions are for the GPU's own number of workers
    with pytest.raises(ArgumentError, match="draw='shift'"):
        planned.picture(site, "sm_90", ranking, draw=("shift",))


def test_without_predictions_times_are_the_planners_units() -> None:
    found = planned.picture(SITE, "sm_80", rank(SITE, "sm_80"))
    assert found.unit == simulated.PLAN_UNIT
    assert {run.name for run in found.timelines} >= {"two_pass", "spt", "bent_fold"}


SPAN = {"sm": 3, "work_id": 0, "head": 0, "kv": 0, "q": 0, "start": 0, "wait": 900, "added": 1000, "end": 1150}


def recorded(tmp_path: Path, *spans: dict[str, Any], unit: str = "ns") -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"unit": unit, "spans": spans, "meta": {"gpu": "a GPU"}}))
    return path


def test_a_recorded_run(tmp_path: Path) -> None:
    second = {**SPAN, "sm": 1, "work_id": 1, "kv": 1, "start": 100, "wait": 800, "added": 1200, "end": 1199}
    run = measured.read(recorded(tmp_path, second, SPAN), ("head 0",))
    assert (run.unit, run.lanes, run.end) == (MICROSECONDS, ("SM 3", "SM 1"), 1.2)
    assert (run.measured, run.note) == (True, "a GPU")
    assert run.steps == (
        Step(0, 0, 0, 0, 0, 0, 0.0, 0.9, 1.0, 1.15),
        Step(1, 1, 0, 1, 0, 1, 0.1, 0.8, 1.2, 1.2),  # an end before `added` counts as equal
    )


def test_a_recorded_run_of_another_shape_is_refused(tmp_path: Path) -> None:
    path, sizes = tmp_path / "run.json", {name: getattr(SITE, name) for name in planned.SIZES}
    for name in planned.SIZES:
        for size in (sizes[name], sizes[name] + 1):
            meta = {"shape": {**sizes, name: size}, "schedule": "bent_fold", "gpu": "a GPU"}
            path.write_text(json.dumps({"unit": "ns", "spans": [SPAN], "meta": meta}))
            if size == sizes[name]:
                found = planned.picture(SITE, "sm_90", rank(SITE, "sm_90"), draw=("bent_fold",), recorded=path)
                assert found.timelines[0].note == "a GPU, bent_fold, 1 of 8 heads"
            else:
                with pytest.raises(ArgumentError, match=f"a run of {name}={size}"):
                    planned.picture(SITE, "sm_90", rank(SITE, "sm_90"), draw=("bent_fold",), recorded=path)


def test_a_recorded_run_says_that_heads_are_missing(tmp_path: Path) -> None:
    path = recorded(tmp_path, SPAN)
    assert measured.read(path, ("head 0",)).note == "a GPU"
    assert measured.read(path, ("head 0", "head 1")).note == "a GPU, 1 of 2 heads"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"end": -1}, "numbers >= 0"),
        ({"start": 2000}, "start <= end"),
        ({"sm": "x"}, "integers"),
        ({"head": 9}, "a run of 10 heads"),
    ],
)
def test_a_bad_recorded_run(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        measured.read(recorded(tmp_path, SPAN | change), ("head 0",))


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"unit": "us", "spans": []}', '{"unit": "ns"}', '{"unit": "ns", "spans": [], "meta": {"shape": 3}}'],
)
def test_files_that_are_no_recorded_runs(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match="measured="):
        measured.read(path)
    with pytest.raises(ArgumentError, match="measured="):
        measured.read(tmp_path / "missing.json")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "this is a FIFO"),
        (os.mkdir, "this is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "this is a device"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (sparse, "a file of 1099511627776 bytes or more, where 268435456 are allowed"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "no JSON"),
        (lambda path: path.write_text("[" * 100_000), "no JSON"),
        (lambda path: path.write_text('{"unit": "ns", "unit": "ns", "spans": []}'), "'unit' is there twice"),
        (lambda path: path.write_text('{"unit": "ns", "spans": [], "x": NaN}'), "NaN"),
        (lambda path: path.write_text('{"unit": "ns", "spans": [], "x": 1e999}'), "not finite"),
        (lambda path: path.write_text('{"spans": ' + "9" * 10_000 + "}"), "an integer of 10000 characters"),
        (lambda path: path.write_text('{"unit": "ns", "spans": [], "meta": {"gpu": [[]]}}'), "gpu="),
        (lambda path: path.write_text('{"unit": "ns", "spans": [], "meta": {"schedule": "%s"}}' % ("x" * 201)), "200"),
        (lambda path: path.write_text(json.dumps({"unit": "ns", "spans": [["\x1b[2J" * 10**5]]})), r"\\x1b\[2J"),
    ],
)
def test_files_that_only_look_like_recorded_runs(tmp_path: Path, make: Callable[[Path], object], said: str) -> None:
    """Nothing is waited for, nothing large is built, and a message is short and printable."""
    make(tmp_path / "run.json")
    with pytest.raises(ArgumentError, match=said) as caught:
        measured.read(tmp_path / "run.json")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "change", [{"sm": 1 << 31}, {"work_id": 1 << 31}, {"head": 1 << 20}, {"end": 1 << 63}, {"kv": True}, {"q": 0.5}]
)
def test_numbers_of_a_recorded_run_have_a_range(tmp_path: Path, change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(ArgumentError, match=name):
        measured.read(recorded(tmp_path, SPAN | change))


def test_too_many_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_SPANS", 2)
    assert measured.read(recorded(tmp_path, SPAN, SPAN)).steps
    with pytest.raises(ArgumentError, match="3 spans"):
        measured.read(recorded(tmp_path, SPAN, SPAN, SPAN))
    monkeypatch.setattr(measured, "_VALUES", 60)
    with pytest.raises(ArgumentError, match="values, where 60 are allowed"):
        measured.read(recorded(tmp_path, SPAN, SPAN, SPAN))


def test_the_name_of_a_gpu_is_shown_as_it_can_be(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(
        json.dumps({"unit": "ns", "spans": [SPAN], "meta": {"gpu": "a\x1b[2J\u202eb", "schedule": "\ud800"}})
    )
    assert measured.read(path).note == r"a\x1b[2J\u202eb, \ud800"


def test_a_recorded_run_beside_the_prediction(tmp_path: Path) -> None:
    """On an architecture without predictions, the chosen schedule is scaled to the recorded run."""
    path = recorded(tmp_path, SPAN)
    found = planned.picture(SITE, "sm_80", rank(SITE, "sm_80"), recorded=path)
    assert found.timelines[0].name == "measured"
    ends = {run.badge: run.end for run in found.timelines}
    assert ends["chosen"] == pytest.approx(ends["real run"]) == 1.15
    assert found.unit == MICROSECONDS
    assert MODEL_UNIT != MICROSECONDS
