"""The kernel family of a site: on sm_90 the portable one only for reasons that are listed here, or measured."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from dash_inductor.kernels.families import HOPPER, PORTABLE
from dash_inductor.kernels.hopper.family import NARROW
from dash_inductor.model import AttentionSpec, Bias, Operand, Site
from dash_inductor.planning import plan, planner
from tools.portable_sites import ARCH, sites, why_portable

from ..support.distribution import ROOT

RESULTS = ROOT / "benchmarks" / "results"
REASONS = (
    r"there are no such kernels for sm_90 and float32",
    r"head dims (\d+) of q and k and \1 of v are not covered: multiples of 8, equal ones from 40 to 256, .*",
    r"its kernels do not read bias",
    r"a window of at most 64 to either side takes longer on Hopper kernels: benchmarks/results/(\w+\.json)",
)


def site(text: str, head_dim: int = 64, group: int = 1, **changes: object) -> Site:
    mask, slash, rest = text.partition("/")
    spec = AttentionSpec.parse(f"{mask}/scale=0.125{slash}{rest}")
    facts = Site("cuda", "bfloat16", 2, 8, 8 // group, 4096, 4096, head_dim, head_dim, spec)
    return replace(facts, **changes)  # type: ignore[arg-type]  # the names are Site's


def bounded(text: str, head_dim: int = 64, softcap: float = 50.0) -> Site:
    """A site with a bound of scores."""
    facts = site(text, head_dim)
    return replace(facts, spec=replace(facts.spec, softcap=softcap))


@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("text", ["full", "causal", "band(0,1023)", "causal & keys(0)", "dense(0)", "segments(0,0)"])
def test_bounded_scores(text: str, head_dim: int) -> None:
    """They run on the Hopper kernels in both directions, without a prediction, and the bound is in the key."""
    facts = bounded(text, head_dim)
    chosen = plan(facts, ARCH)
    assert (chosen.kernel, chosen.forward) == ("hopper", "hopper")
    assert f"/{text} + softcap 50.0/" in chosen.numerics_key
    for gpu in HOPPER.times:
        assert HOPPER.unpredicted(chosen, facts, ARCH, gpu, None)
        assert HOPPER.predicted_forward_us(chosen, facts, ARCH, gpu) is None
    if head_dim <= 128:
        assert plan(facts, "sm_80").kernel == "portable"


def test_bounded_scores_with_a_bias_are_left_to_the_portable_kernels() -> None:
    facts = bounded("causal", 128)
    facts = replace(facts, spec=replace(facts.spec, bias=Bias(Operand(0))))
    assert plan(facts, ARCH).kernel == "portable"
    assert HOPPER.why_not(facts, ARCH) == "its kernels do not read bias"


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.full)])
def test_portable_kernels_run_on_hopper_for_these_reasons_alone(step: int) -> None:
    """``python -m tools.portable_sites`` prints the sweep, of which this has every seventh site always."""
    found: Counter[str] = Counter()
    for facts in itertools.islice(sites(), 0, None, step):
        reason = why_portable(facts)
        if reason is None:
            continue
        (kind,) = (pattern for pattern in REASONS if re.fullmatch(pattern, reason))
        found[kind] += 1
        if kind == REASONS[0]:
            assert facts.dtype == "float32"
        elif kind == REASONS[1]:
            assert facts.head_dim <= 32
        elif kind == REASONS[2]:
            assert facts.spec.bias is not None
        else:
            assert 0 < max(abs(facts.band.lo or 0), abs(facts.band.hi or 0)) <= NARROW
            assert facts.band.is_window
            assert facts.head_dim <= 64
    assert set(found) == set(REASONS)


@pytest.mark.parametrize("row", json.loads((RESULTS / "bands.json").read_text())["rows"], ids=lambda row: row["shape"])
def test_what_is_left_to_portable_kernels_was_measured_to_be_faster_there(row: dict[str, float]) -> None:
    """Other sites were not measured to be faster there, but for the gain of small problems by shorter launches."""
    dim, text, size, length = str(row["shape"]).rsplit(":", 3)[-4:]
    facts = site(text, int(dim.removeprefix("d")))
    left = HOPPER.leaves(facts) is not None
    if (size, length) == ("b1h8", "s2048"):
        assert not left or row["ratio"] < 1
    else:
        assert left == (row["ratio"] < 0.99)


@pytest.mark.parametrize("mask", ["band(-10,none)", "band(none,10)", "band(-1,2047)", "band(0,127)", "band(-65,64)"])
def test_families_that_are_not_calibrated_together_are_not_compared(mask: str) -> None:
    """Their critical paths say the opposite of what was measured: ``band(-10,none)`` takes 1.5 times as long."""
    facts = site(mask)
    chosen = plan(facts, ARCH)
    assert (chosen.kernel, chosen.forward) == ("hopper", "hopper")


def test_the_first_of_these_would_be_portable_by_its_critical_path() -> None:
    """The control of the test above."""
    facts = site("band(-10,none)")
    (portable, _), hopper = PORTABLE.candidates(facts, ARCH), planner.choose(facts, ARCH)
    assert planner.critical_path("two_pass", portable, facts.band, ARCH) < hopper.length


@pytest.mark.parametrize(
    ("facts", "kernel"),
    [
        (site("band(-64,64)"), "portable"),
        (site("band(-64,64)", 40), "portable"),
        (site("band(-64,64) & keys(0)"), "portable"),
        (site("band(-64,64)", 128), "hopper"),
        (site("band(-64,64)", group=2), "portable"),
        (site("band(-64,64) & segments(0,0)"), "hopper"),
        (site("band(-64,64) & dense(0)"), "hopper"),
        (site("band(-64,65)"), "hopper"),
        (site("band(0,0)"), "hopper"),
        (bounded("band(-64,64)"), "hopper"),  # nobody has measured it
    ],
)
def test_narrow_windows(facts: Site, kernel: str) -> None:
    """Only what was measured is left to the portable kernels, whatever the lengths are."""
    for lengths in ((4096, 4096), (100, 333), (None, None)):
        changed = replace(facts, q_len=lengths[0], kv_len=lengths[1])
        assert plan(changed, ARCH).kernel == kernel
        assert plan(changed, ARCH, "spt").kernel == "hopper"
        assert plan(changed, ARCH, "two_pass").kernel == "portable"


def test_other_architectures_have_no_choice() -> None:
    for arch in ("sm_80", "sm_100"):
        for text in ("causal", "band(-10,none)", "band(-64,64)"):
            assert plan(site(text), arch).kernel == "portable"
