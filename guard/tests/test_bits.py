"""Four processes under the guard, in five kinds of parallelism: planted bits are named, and nothing else is."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

from .campaign import score
from .kinds import KINDS
from .support import planted
from .support.planted import MODES, Trial

QUICK = [("ddp", "update"), ("fsdp", "gathered"), ("fsdp", "optimizer state"), ("fsdp", "learning rate")]
"""A fault for each check, which is also planted with that check off."""
FAULTS = [
    *QUICK[:3], ("ddp", "parameter"), ("ddp", "gradient"), ("hsdp", "gradient"), ("hsdp", "update"),
    ("hsdp", "parameter in step"), ("tp", "update"), ("replicate", "gradient"), ("replicate", "buffer"),
    QUICK[3], ("hsdp", "learning rate"), ("fsdp", "step not counted"),
]  # fmt: skip
QUICK_MODES = ("ddp", "fsdp")


def marked(things: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Parameters of a test, of which those that are not quick are for full runs."""
    rows = [(each, each if isinstance(each, tuple) else (each,)) for each in things]
    return [pytest.param(*row, marks=[] if each in quick else pytest.mark.full) for each, row in rows]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All trials that are wanted, by name, of one set of processes."""
    full = any(item.path == request.path and item.get_closest_marker("full") for item in request.session.items)
    short = {"steps": 6, "step": 4}  # settings have been agreed on by then
    trials = {f"{mode} clean": Trial(mode, steps=6) for mode in (MODES if full else QUICK_MODES)}
    for number, (mode, kind) in enumerate(FAULTS):
        if full or (mode, kind) in QUICK:
            lengths = {} if mode == "tp" else short  # classes are learned first; a shard has no replica
            trials[f"{mode} {kind}"] = Trial(mode, kind, rank=number % 4, seed=number + 4 * (mode == "tp"), **lengths)
    for mode, kind in QUICK:
        off = dict.fromkeys(KINDS[kind].without, 0)
        trials[f"{mode} {kind} off"] = Trial(mode, kind, rank=1, seed=5, settings=off, **short)
    found = planted.run(list(trials.values()), tmp_path_factory.mktemp("planted"))
    return dict(zip(trials, found, strict=True))


@pytest.mark.parametrize("mode", marked(MODES, QUICK_MODES))
def test_a_clean_run(results: dict[str, dict[str, Any]], mode: str) -> None:
    result = results[f"{mode} clean"]
    assert result["findings"] == []
    assert result["off"] == []
    coverage = result["coverage"]
    assert coverage["at_rest"]["counts"]["comparisons"] == 4 * 11
    assert coverage["bits"]["counts"]["compared"] >= 4 * 6
    assert ("gathered_parameters" in coverage) == (mode in ("fsdp", "hsdp"))
    assert all(name in ("bits",) for name, entry in coverage.items() if entry["unseen"])
    assert result["largest"] <= (16 << 10 if mode == "tp" else 1 << 10)


@pytest.mark.parametrize(("mode", "kind"), marked(FAULTS, QUICK))
def test_a_planted_bit_is_named(results: dict[str, dict[str, Any]], mode: str, kind: str) -> None:
    result = results[f"{mode} {kind}"]
    found = score(result)
    assert result["trial"]["fact"]
    assert found.named or (found.tie and mode in KINDS[kind].tie), result["findings"]
    assert found.step, result["findings"]
    assert found.tensor, result["findings"]
    assert found.false == 0, result["findings"]
    assert result["off"] == []


@pytest.mark.parametrize(("mode", "kind"), QUICK)
def test_the_same_bit_is_not_seen_without_the_check(results: dict[str, dict[str, Any]], mode: str, kind: str) -> None:
    result = results[f"{mode} {kind} off"]
    assert result["trial"]["fact"]
    assert result["findings"] == []
