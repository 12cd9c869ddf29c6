"""Four processes under the guard, in five kinds of parallelism: planted bits are named, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest

from ..support import planted
from ..support.planted import MODES, Trial
from .campaign import score
from .kinds import KINDS

FAULTS = [
    ("ddp", "gradient"), ("ddp", "parameter"), ("ddp", "update"), ("fsdp", "optimizer state"), ("fsdp", "gathered"),
    ("hsdp", "gradient"), ("hsdp", "parameter in step"), ("tp", "update"), ("replicate", "gradient"),
    ("replicate", "buffer"),
]  # fmt: skip
CONTROLS = [("ddp", "gradient"), ("fsdp", "gathered"), ("fsdp", "optimizer state")]
"""The same faults with the check off that finds them."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All trials, by name, of one set of processes."""
    short = {"steps": 6, "step": 3}
    trials = {f"{mode} clean": Trial(mode, steps=6) for mode in MODES}
    for number, (mode, kind) in enumerate(FAULTS):
        lengths = {} if mode == "tp" else short  # classes are learned first
        trials[f"{mode} {kind}"] = Trial(mode, kind, rank=number % 4, seed=number, **lengths)
    for mode, kind in CONTROLS:
        off = dict.fromkeys(KINDS[kind].without, 0)
        trials[f"{mode} {kind} off"] = Trial(mode, kind, rank=1, seed=5, settings=off, **short)
    found = planted.run(list(trials.values()), tmp_path_factory.mktemp("planted"))
    return dict(zip(trials, found, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_a_clean_run(results: dict[str, dict[str, Any]], mode: str) -> None:
    result = results[f"{mode} clean"]
    assert result["findings"] == []
    assert result["off"] == []
    coverage = result["coverage"]
    assert coverage["rest"]["counts"]["comparisons"] == 4 * 11
    assert (mode == "fsdp") == ("compared" not in coverage["bits"]["counts"])
    assert ("doors" in coverage) == (mode in ("fsdp", "hsdp"))
    assert all(name in ("bits",) for name, entry in coverage.items() if entry["unseen"])
    assert result["largest"] <= (16 << 10 if mode == "tp" else 1 << 10)


@pytest.mark.parametrize(("mode", "kind"), FAULTS)
def test_a_planted_bit_is_named(results: dict[str, dict[str, Any]], mode: str, kind: str) -> None:
    result = results[f"{mode} {kind}"]
    found = score(result)
    assert result["trial"]["fact"]
    assert found.named or (found.tie and mode in KINDS[kind].tie), result["findings"]
    assert found.step, result["findings"]
    assert found.tensor, result["findings"]
    assert found.false == 0, result["findings"]
    assert result["off"] == []


@pytest.mark.parametrize(("mode", "kind"), CONTROLS)
def test_the_same_bit_is_not_seen_without_the_check(results: dict[str, dict[str, Any]], mode: str, kind: str) -> None:
    result = results[f"{mode} {kind} off"]
    assert result["trial"]["fact"]
    assert result["findings"] == []
