"""Predicted times against measured ones, and the ranking of candidates."""

from __future__ import annotations

import runpy
from dataclasses import replace
from typing import Any

import pytest

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.hopper import prediction as hopper_prediction
from dash_inductor.kernels.hopper.calibration import CALIBRATIONS, DATA
from dash_inductor.model import AttentionSpec, Band, Bias, Dropout, Mask, Operand, Site
from dash_inductor.model.site import NOMINAL_BATCH, NOMINAL_LEN
from dash_inductor.planning import plan
from dash_inductor.planning.prediction import predicted_forward_us, predicted_us, unknown
from dash_inductor.planning.ranking import Candidacy, chosen_of, rank
from dash_inductor.schedule.names import NAMES
from dash_inductor.schedule.problem import Problem

from ..support.distribution import ROOT


def site(mask: str = "causal", dim: int = 128, **changes: Any) -> Site:
    spec = AttentionSpec(Mask.parse(mask), 0.125)
    base = Site("cuda", "bfloat16", 4, 16, 16, 4096, 4096, dim, dim, spec)
    return replace(base, **changes)


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "predictions.py"))


def test_the_page_has_the_predictions(tool: dict[str, Any]) -> None:
    """If this fails, run ``python -m tools.predictions``, which says where a prediction is too far off."""
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    assert tool["filled"](page) == page
    assert tool["BOUND"] == 0.05


def test_what_is_measured_and_held_out(tool: dict[str, Any]) -> None:
    points = tool["points"]()
    backwards = [p for p in points if not p.forward]
    held = [p for p in backwards if not p.fitted]
    assert len(backwards) >= 61
    assert len({p.shape for p in backwards}) >= 41
    assert len({p.shape for p in held}) >= 20
    assert {p.dims for p in held} == {p.dims for p in backwards} == {(64, 64), (128, 128), (192, 128)}
    assert len({p.shape for p in points if p.forward}) >= 30
    assert sum(not p.fitted for p in points) >= 39


def test_every_backward_of_the_results_has_a_prediction_but_that_of_head_dim_256(tool: dict[str, Any]) -> None:
    rows = [row["shape"] for name in tool["BACKWARDS"] for row in tool["_rows"](name)]
    predicted = [p.shape for p in tool["points"]() if not p.forward]
    assert [shape for shape in rows if shape not in predicted] == ["wide:d256:causal:b4h8:s4096"]
    assert len(rows) == len(predicted) + 1


@pytest.mark.parametrize("name", ["step", "tile_schedule"])
def test_wrong_constants_are_noticed(tool: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 6 %, or a tile schedule of 2 steps, more."""
    found = CALIBRATIONS["H200"]
    rates = found.backward[128, 128]
    wrong = replace(rates, **{name: rates.step * 1.06 if name == "step" else rates.tile_schedule + 2 * rates.step})
    changed = replace(found, backward={**found.backward, (128, 128): wrong})
    monkeypatch.setitem(CALIBRATIONS, "H200", changed)
    with pytest.raises(SystemExit, match=r"d128.* is off by more than 0\.05"):
        tool["text"](tool["points"]())


@pytest.mark.full
def test_the_constants_are_those_that_are_fitted(tool: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """To a per cent of a step's time; the measurements do not tell constants apart that hardly matter."""
    tool["fit_all"]()
    lines = capsys.readouterr().out.splitlines()
    rates: list[Any] = [r for c in CALIBRATIONS.values() for r in (*c.backward.values(), *c.forward.values())]
    for line, expected in zip(lines, rates, strict=True):
        step = float(line.split("step=")[1].split(",")[0])
        assert step == pytest.approx(expected.step, rel=0.01), line


def test_a_prediction_is_for_the_site_itself() -> None:
    """More of anything takes longer: batch elements, heads, tokens, and less of a mask."""
    sites = [site(), site(batch=8), site(q_heads=32, kv_heads=32), site(q_len=8192, kv_len=8192), site("full")]
    times = [predicted_us(plan(s, "sm_90"), s, "sm_90") for s in sites]
    base, *more = (t for t in times if t is not None)
    assert len(more) == 4
    assert all(time > 1.5 * base for time in more)
    grouped = site(kv_heads=4)
    assert (predicted_us(plan(grouped, "sm_90"), grouped, "sm_90") or 0.0) > base
    window = site("band(0,1023)")
    assert (predicted_us(plan(window, "sm_90"), window, "sm_90") or base) < base


def test_dynamic_sizes_count_as_nominal_ones() -> None:
    dynamic = site(batch=None, q_len=None, kv_len=None)
    nominal = site(batch=NOMINAL_BATCH, q_len=NOMINAL_LEN, kv_len=NOMINAL_LEN)
    chosen = plan(nominal, "sm_90")
    assert predicted_us(chosen, dynamic, "sm_90") == predicted_us(chosen, nominal, "sm_90")
    assert predicted_forward_us(chosen, dynamic, "sm_90") == predicted_forward_us(chosen, nominal, "sm_90")


@pytest.mark.parametrize("predict", [predicted_us, predicted_forward_us])
def test_long_launches_are_cut_short(predict: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    large = site(batch=64, q_len=1024, kv_len=1024)
    chosen = plan(large, "sm_90")
    whole = predict(chosen, large, "sm_90")
    monkeypatch.setattr(hopper_prediction, "TILE_SCHEDULES", 1024)
    cut = predict(chosen, large, "sm_90")
    assert cut != whole
    assert cut == pytest.approx(whole, rel=0.03)


def calls(**changes: Any) -> AttentionSpec:
    return replace(AttentionSpec(Mask.parse("causal"), 0.125), **changes)


UNKNOWN = [
    (site(), "sm_100", None, "sm_100 is not calibrated"),
    (site(dim=32), "sm_90", None, "the portable kernels are not calibrated"),
    (site(spec=calls(bias=Bias(Operand(0)))), "sm_90", None, "the portable kernels are not calibrated"),
    (replace(site(), dtype="float32"), "sm_90", None, "the portable kernels are not calibrated"),
    (site(), "sm_103", None, "sm_103 is not calibrated"),
    (site(dim=256), "sm_90", None, "head dims 256 and 256 are not calibrated on an H200"),
    (site("band(-512,511)"), "sm_90", "spt", "the mask band(-512,511) is not calibrated"),
    (site("causal & segments(0,0)"), "sm_90", None, "the time depends on the documents, which are data"),
    (site("keys(0)", dim=64), "sm_90", None, "keys at head dims 64 and 64: not calibrated"),
    (site(), "sm_90", "ascending", "CTAs of ascending wait for one another under this mask, which is not calibrated"),
    (site(), "sm_90", "descending", "CTAs of descending wait for one another under this mask, which is not calibrated"),
    (site(), "sm_90", "symmetric_shift", "symmetric_shift is not calibrated"),
    (site(batch=1, q_heads=1, kv_heads=1), "sm_90", "spt", "spt is not calibrated where all CTAs run at once"),
    (site("full"), "sm_90", "bent_fold", "bent_fold is not calibrated under a full mask"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "arch", "schedule", "why"), UNKNOWN)
def test_what_is_not_known_is_said(facts: Site, arch: str, schedule: str | None, why: str) -> None:
    chosen = plan(facts, arch, schedule)
    assert predicted_us(chosen, facts, arch) is None
    assert unknown(chosen, facts, arch) == why


def test_masks_that_are_data_and_dropout_have_factors() -> None:
    plain, dropped = site("full"), site("full", spec=replace(site("full").spec, dropout=Dropout(0.1, Operand(0))))
    keys, dense = site("keys(0)"), site("dense(0)")

    def us(facts: Site) -> float:
        found = predicted_us(plan(facts, "sm_90"), facts, "sm_90")
        assert found is not None
        return found

    assert us(keys) == pytest.approx(DATA["keys"] * us(plain))
    assert us(dropped) == pytest.approx(DATA["dropout"] * us(plain))
    assert us(dense) == pytest.approx(DATA["dense"] * us(site("causal")))  # as it is planned


def documents_us(lengths: tuple[int, ...], mask: str = "causal & segments(0,0)", batch: int = 1) -> float:
    facts = site(mask, batch=batch, q_len=sum(lengths), kv_len=sum(lengths))
    found = predicted_us(plan(facts, "sm_90", "spt"), facts, "sm_90", documents=lengths)
    assert found is not None
    return found


def test_documents_take_the_time_of_what_they_see() -> None:
    """More documents of as many tokens see less; one of all tokens sees what the band does, in larger head chunks."""
    times = [documents_us((16384 // n,) * n) for n in (1, 2, 4, 16)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 3 * times[-1]
    band = site(batch=1, q_len=16384, kv_len=16384)
    assert times[0] == pytest.approx(predicted_us(plan(band, "sm_90", "spt"), band, "sm_90"), rel=0.02)
    assert documents_us((1000, 7192), batch=2) > 1.5 * documents_us((1000, 7192))


@pytest.mark.parametrize("mask", ["full", "causal", "band(0,300)"])
@pytest.mark.parametrize("lengths", [(640,), (128, 512), (100, 1, 39, 500), (1,) * 7 + (633,)])
def test_tiles_of_documents(mask: str, lengths: tuple[int, ...]) -> None:
    """Every pair of tokens, one by one."""
    problem = Problem(Band.parse(mask), 640, 640, 64, 128)
    document = [i for i, length in enumerate(lengths) for _ in range(length)]
    expected = []
    for kv in range(problem.n_kv):
        seen = [
            [
                document[i] == document[j] and problem.band.visible(i, j, 640, 640)
                for i in range(q * 64, q * 64 + 64) for j in range(kv * 128, kv * 128 + 128)
            ]
            for q in range(problem.n_q)
        ]  # fmt: skip
        expected.append((sum(map(any, seen)), sum(any(pairs) and not all(pairs) for pairs in seen)))
    assert hopper_prediction._tiles_of(lengths, problem) == expected


@pytest.mark.parametrize(
    ("mask", "documents", "allowed"),
    [
        ("causal", (4096,), "None for a mask without segments"),
        ("segments(0,0)", (), "one length at least"),
        ("segments(0,0)", (4096, 0), "none below 1"),
        ("segments(0,0)", (4096, 1), "lengths whose sum is q_len=4096"),
    ],
)
def test_wrong_documents_are_named(mask: str, documents: tuple[int, ...], allowed: str) -> None:
    with pytest.raises(ArgumentError, match=f"documents=.*{allowed}"):
        rank(site(mask), "sm_90", documents=documents)


def test_a_gpu_that_was_not_measured_is_named() -> None:
    facts = site()
    with pytest.raises(ArgumentError, match="gpu='B300' is not allowed"):
        predicted_us(plan(facts, "sm_90"), facts, "sm_90", "B300")


def by_schedule(ranking: tuple[Candidacy, ...], kernel: str = "hopper") -> dict[str | None, Candidacy]:
    return {c.schedule: c for c in ranking if c.kernel == kernel}


@pytest.mark.parametrize("facts", [site(), site("full", 64), site("band(-64,64)", 64), site("causal & segments(0,0)")])
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_every_candidate_is_ranked(facts: Site, arch: str) -> None:
    ranking = rank(facts, arch)
    assert chosen_of(ranking).plan == plan(facts, arch)
    assert [c.chosen for c in ranking].count(True) == 1
    assert all(c.why for c in ranking)
    assert {c.schedule for c in ranking if c.kernel == "portable"} == set(NAMES)
    assert by_schedule(ranking).keys() == ({None} if arch == "sm_80" else set(NAMES) - {"two_pass"})
    able = [c for c in ranking if c.plan is not None]
    assert ranking[: len(able)] == tuple(able)
    times = [c.predicted_us for c in able if c.predicted_us is not None]
    assert times == sorted(times)
    assert [c.predicted_us is None for c in able] == sorted(c.predicted_us is None for c in able)
    assert all((c.predicted_us is None) == bool(c.note) for c in able)
    assert all(c.plan is None or (c.plan.schedule, c.plan.kernel) == (c.schedule, c.kernel) for c in ranking)


def test_why_candidates_lose() -> None:
    found = by_schedule(rank(site(), "sm_90"))
    assert found["bent_fold"].why == "its critical path is the shortest"
    assert found["spt"].why.startswith("its critical path is as long as that of bent_fold, which is considered first")
    assert found["ascending"].why == "its critical path is 9.1 % longer than that of bent_fold"
    assert found["descending"].why.endswith("which its critical path does not show; named only")
    assert found["symmetric_shift"].why.startswith("its CTAs must all be resident at the same time")
    assert found["shift"].why == "shift needs the full mask"
    portable = by_schedule(rank(site(), "sm_90"), "portable")
    preferred = "the hopper kernels are preferred: the times of the two families are not calibrated together"
    assert portable["two_pass"].why == portable["bent_fold"].why == preferred
    narrow = by_schedule(rank(site("band(-64,64)", 64), "sm_90"))
    assert narrow["spt"].why.endswith("takes longer on Hopper kernels: benchmarks/results/bands.json")
    assert by_schedule(rank(site("band(-64,64)", 64), "sm_90", "spt"))["spt"].chosen
    assert by_schedule(rank(site(), "sm_80"))[None].why == "there are no such kernels for sm_80 and bfloat16"
    documents = by_schedule(rank(site("causal & segments(0,0)"), "sm_90"))
    assert documents["bent_fold"].why == "masks with segments or intervals are planned among ascending, spt, two_pass"
    named = by_schedule(rank(site(), "sm_90", "spt"))
    assert (named["spt"].chosen, named["spt"].why) == (True, "it was named")
    assert named["bent_fold"].why == "schedule='spt' was named"


def test_a_faster_candidate_is_not_hidden() -> None:
    """Many heads: the end of `spt` matters less there than that tile schedules of `bent_fold` go down."""
    ranking = rank(site(batch=32), "sm_90", gpu="H200")
    assert not any("predicted to be faster" in c.why for c in rank(site(), "sm_90", gpu="H200"))
    assert [(c.schedule, c.chosen) for c in ranking[:2]] == [("spt", False), ("bent_fold", True)]
    assert ranking[0].why.endswith("; at this site it is predicted to be faster, but choices ignore lengths and batch")
    assert not any("predicted to be faster" in c.why for c in ranking[1:])


def test_sites_that_no_kernel_covers_have_reasons() -> None:
    ranking = rank(site(dim=520), "sm_90")
    assert {c.kernel for c in ranking} == {"portable", "hopper"}
    assert all("head dims 520 of q and k" in c.why and c.plan is None for c in ranking)
    with pytest.raises(ArgumentError, match="a site that a kernel covers"):
        chosen_of(ranking)
    (reads,) = (c for c in rank(site(spec=calls(bias=Bias(Operand(0)))), "sm_90") if c.kernel == "hopper")
    assert reads.why == "its kernels do not read bias"


@pytest.mark.parametrize(
    ("mask", "length", "heads"), [("band(0,1023)", 32768, 4), ("full", 16384, 4), ("causal", 16384, 1)]
)
def test_heads_that_are_launched_together_at_least(mask: str, length: int, heads: int) -> None:
    """A minimum, if CTAs of a head keep less than the head in the L2 cache; if they keep all of it, as many as fit."""
    assert plan(site(mask, batch=1, q_len=length, kv_len=length), "sm_90").head_chunk == heads
