"""The benchmark of single sites: its clock, what it compares, and what it says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config

import dash_inductor
from benchmarks import site, variants
from benchmarks.timing import Timing, take_turns
from dash_inductor.config import config

TINY = site.Shape(1, 2, 2, 32, 16, True)


@pytest.fixture(autouse=True)
def quick_compiler() -> Iterator[None]:
    """C++ without optimisation."""
    with torch._inductor.config.patch({"aot_inductor.debug_compile": True}):
        yield


def test_calls_take_turns() -> None:
    order: list[str] = []
    timings = take_turns({name: lambda name=name: order.append(name) for name in "ab"}, "cpu", repeats=2, warmup=1)  # type: ignore[misc]
    assert order == ["a", "b", "a", "b", "a", "b"]
    assert set(timings) == {"a", "b"}


def test_timing_has_the_quartiles() -> None:
    assert Timing.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Timing(median=3.0, low=2.0, high=4.0)
    assert Timing.of([7.0]) == Timing(7.0, 7.0, 7.0)


@pytest.mark.parametrize(
    ("values", "same"), [((1.0, 1.0, 1.0), True), ((1.0, 1.0, 1.0 + 2**-20), False), ((0.0, 0.0, -0.0), False)]
)
def test_same_bits_compares_bytes(values: tuple[float, ...], same: bool) -> None:
    left = [torch.tensor([value]) for value in values]
    assert variants.same_bits(lambda: [left.pop(0)], 2) is same


def ours(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return next(row for row in rows if row["variant"] == "dash")


def test_three_variants_are_compared() -> None:
    with config.patch(cpu="reference"):
        rows = site.measure(TINY, "cpu", repeats=2)
    assert [row["variant"] for row in rows] == [variant.name for variant in variants.VARIANTS]
    assert all(row["ms"] > 0 and row["same bits"] and row["said"] == "" for row in rows)
    assert ours(rows)["x dash"] == 1
    (record,) = dash_inductor.sites()  # the other two variants are without dash_inductor
    assert record.status == "replaced"
    assert not torch.are_deterministic_algorithms_enabled()


def test_variants_differ_in_what_runs() -> None:
    """On a CPU the default and the deterministic kernel are one, and the reference executor adds in another order."""
    gradients = {}
    with config.patch(cpu="reference"):
        for variant in variants.VARIANTS:
            with variant.active():
                gradients[variant.name] = site.prepare(site.Shape(1, 2, 2, 256, 64, True), variant, "cpu")()
    equal = [torch.equal(gradients["default"][0], gradients[name][0]) for name in ("deterministic", "dash")]
    assert equal == [True, False]
    torch.testing.assert_close(gradients["default"], gradients["dash"])


def test_fallback_attention_is_said() -> None:
    assert "cpu_off" in ours(site.measure(TINY, "cpu", repeats=1))["said"]  # config.cpu is "off"


def test_other_variants_are_without_dash_inductor_in_all_threads() -> None:
    seen = []
    for variant in variants.VARIANTS:
        with variant.active():
            thread = threading.Thread(target=lambda: seen.append(dash_inductor.is_enabled()))
            thread.start()
            thread.join()
    assert seen == [False, False, True]
    assert dash_inductor.is_enabled()


def test_what_does_not_run_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("No available kernel.\nAborting execution.")

    monkeypatch.setattr(site, "prepare", refuse)
    assert {row["said"] for row in site.measure(TINY, "cpu")} == {"not run: RuntimeError: No available kernel."}


@pytest.mark.parametrize(
    ("same", "said", "status"), [(True, "", 0), (False, "", 1), (True, "not replaced: a reason", 1)]
)
def test_status(same: bool, said: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"site": "a", "variant": "dash", "ms": 1.0, "same bits": same, "said": said}
    monkeypatch.setattr(site, "measure", lambda *_, **__: [row])
    assert site.main([]) == status
