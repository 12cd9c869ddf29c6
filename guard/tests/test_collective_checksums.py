"""Checks of collectives on several processes: damaged ones are named, no bit changes, and hooks of the program
remain.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest

from dash_guard.detectors.collective_checksums import CollectiveChecksums
from dash_guard.detectors.detector import Job
from dash_guard.report.findings import Finding
from dash_guard.transport.messages import Message

from .support import damaged_collectives
from .support.damaged_collectives import AT, OUTPUT, Trial

REDUCE, SCATTER, GATHER = "allreduce_", "_reduce_scatter_base_", "_allgather_base_"
CLEAN = {mode: Trial(mode) for mode in ("ddp", "replicate", "fsdp")}
OWN = {mode: Trial(mode, own=True) for mode in ("ddp", "fsdp")}
DAMAGED = {
    "all_reduce of 0-2": Trial("ddp", 1, REDUCE, number=3),  # the bucket that this backward repeats
    "one result of all_reduce of 0-2": Trial("ddp", 1, REDUCE, OUTPUT),
    "reduce_scatter of 0-2": Trial("fsdp", 1, SCATTER, number=2),
    "all_gather of 0-2 in the backward": Trial("fsdp", 1, GATHER, OUTPUT, number=4),
    "all_gather of 0-2 in the forward": Trial("compiled fsdp", 1, GATHER, OUTPUT, number=1),
}
QUICK = ("all_reduce of 0-2", "reduce_scatter of 0-2", "all_gather of 0-2 in the backward")
QUICK_CLEAN, QUICK_OWN = ("ddp", "fsdp"), ("ddp",)


def off(trial: Trial) -> Trial:
    return Trial(trial.mode, 0, trial.damaged, trial.side, trial.number, trial.own)


def marked(names: Iterable[str], quick: Container[str]) -> list[Any]:
    """Parameters of a test, of which those that are not quick are for full runs."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.full) for name in names]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Trial, dict[str, Any]]:
    """All trials that are wanted, and the same without the checks, of one set of processes."""
    full = any(item.path == request.path and item.get_closest_marker("full") for item in request.session.items)
    kinds = ((CLEAN, QUICK_CLEAN), (OWN, QUICK_OWN), (DAMAGED, QUICK))
    wanted = [of[name] for of, quick in kinds for name in (of if full else quick)]
    trials = list(dict.fromkeys([*wanted, *map(off, wanted)]))
    return dict(zip(trials, damaged_collectives.run(trials, tmp_path_factory.mktemp("damaged")), strict=True))


@pytest.mark.parametrize("mode", marked(CLEAN, QUICK_CLEAN))
def test_checks_change_no_bit_and_name_nobody(results: dict[Trial, dict[str, Any]], mode: str) -> None:
    """Of three ranks, in accumulated steps too, and of gradients after the end of the guard."""
    checked, without = results[CLEAN[mode]], results[off(CLEAN[mode])]
    assert checked["bits"] == without["bits"]
    assert (checked["findings"], checked["off"], without["coverage"]) == ([], [], {})
    coverage = checked["coverage"]
    assert coverage["collective_checksums"]["counts"]["repeated"] >= 12
    assert coverage["collective_checksums"]["counts"]["compared"] == 3 * 4
    assert not any(entry["unseen"] for entry in coverage.values())


@pytest.mark.parametrize("name", marked(DAMAGED, QUICK))
def test_a_broken_wire_is_named_with_its_collective(results: dict[Trial, dict[str, Any]], name: str) -> None:
    """The negative control: the same damage, the same wrong bits, and no check."""
    broken, unseen = results[DAMAGED[name]], results[off(DAMAGED[name])]
    (finding,) = broken["findings"]
    assert (finding["kind"], finding["step"]) == ("collective", AT)
    assert finding["collective"] == name.removeprefix("one result of ")
    assert finding["ranks"] == ([1] if DAMAGED[name].side == OUTPUT else [])
    assert broken["bits"] == unseen["bits"]
    assert unseen["findings"] == []


@pytest.mark.parametrize("mode", marked(OWN, QUICK_OWN))
def test_a_programs_own_way_to_communicate_is_kept(results: dict[Trial, dict[str, Any]], mode: str) -> None:
    checked, without = results[OWN[mode]], results[off(OWN[mode])]
    assert checked["bits"] == without["bits"]
    assert (checked["bits"] == results[CLEAN[mode]]["bits"]) == (mode == "fsdp")  # it halves gradients of DDP
    why = {"ddp": "has its own communication hook", "fsdp": "has its own communication to reduce"}[mode]
    (unseen,) = checked["coverage"]["collective_checksums"]["unseen"]
    assert unseen.endswith(f"the program {why}")
    assert "repeated" not in checked["coverage"]["collective_checksums"]["counts"]


@pytest.mark.full
def test_hsdp_has_hooks_when_it_is_compiled(tmp_path: Path) -> None:
    clean, gathered = damaged_collectives.run(
        [Trial("compiled hsdp"), Trial("compiled hsdp", 1, GATHER, OUTPUT, number=4)], tmp_path, world=4
    )
    assert clean["findings"] == []
    assert clean["coverage"]["gathered_parameters"]["counts"]["compared"] > 0
    assert clean["coverage"]["collective_checksums"]["counts"]["repeated"] > 0
    (finding,) = gathered["findings"]
    assert (finding["ranks"], finding["collective"]) == ([1], "all_gather of 0-1 in the backward")


HSDP = ("hsdp", "accumulated hsdp", "compiled hsdp", "summed hsdp")
BETWEEN = {
    "changed on its way": Trial("hsdp", 1, REDUCE, number=2),  # of the module whose turn it is
    "changed on its way, of sums": Trial("accumulated hsdp", 1, REDUCE, number=1),
    "changed in one result": Trial("hsdp", 1, REDUCE, OUTPUT, number=0),
}


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> dict[Trial, dict[str, Any]]:
    """Trials of two pairs of shards, and the same without the checks."""
    wanted = [*map(Trial, HSDP), Trial("hsdp", own=True), *BETWEEN.values()]
    trials = [*wanted, *map(off, wanted)]
    return dict(zip(trials, damaged_collectives.run(trials, tmp_path_factory.mktemp("between"), world=4), strict=True))


@pytest.mark.full
@pytest.mark.parametrize("mode", HSDP)
def test_hooks_between_groups_of_shards_change_no_bit(between: dict[Trial, dict[str, Any]], mode: str) -> None:
    checked, without = between[Trial(mode)], between[off(Trial(mode))]
    assert checked["bits"] == without["bits"]
    assert (checked["findings"], checked["off"]) == ([], [])
    counts = checked["coverage"]["collective_checksums"]["counts"]
    assert counts["results"] >= 4 * 4 * 3
    assert counts["repeated"] >= 4 * 4 * 2
    assert not checked["coverage"]["collective_checksums"]["unseen"]


@pytest.mark.full
@pytest.mark.parametrize("name", BETWEEN)
def test_a_broken_wire_between_groups_of_shards_is_named(between: dict[Trial, dict[str, Any]], name: str) -> None:
    broken, unseen = between[BETWEEN[name]], between[off(BETWEEN[name])]
    (finding,) = broken["findings"]
    assert (finding["kind"], finding["step"], finding["collective"]) == ("collective", AT, "all_reduce of 1,3")
    assert ("gave two results" in finding["sentence"]) == (BETWEEN[name].side != OUTPUT)
    assert finding["ranks"] == []
    assert broken["bits"] == unseen["bits"]
    assert unseen["findings"] == []
    assert broken["bits"] != between[Trial(BETWEEN[name].mode)]["bits"]


@pytest.mark.full
def test_a_programs_own_way_to_scatter_gets_no_hook_after_it(between: dict[Trial, dict[str, Any]]) -> None:
    checked, without = (between[trial] for trial in (Trial("hsdp", own=True), off(Trial("hsdp", own=True))))
    assert checked["bits"] == without["bits"]
    assert {why.split(" of ")[0] for why in checked["coverage"]["collective_checksums"]["unseen"]} == {
        "all_reduce",
        "reduce_scatter",
    }


def evaluate(reported: dict[int, list[str]], where: str = "all_reduce 0-3") -> list[Finding]:
    detector = CollectiveChecksums(Job(4))
    for rank, of in reported.items():
        detector.take(Message("collective_checksums", rank, 7, {"checksums": {where: {"7": of}}}), 1.0)
    return detector.detect(2.0)


def test_who_is_named() -> None:
    same = {rank: ["a", ""] for rank in range(4)}
    assert evaluate(same) == []
    assert [finding.ranks for finding in evaluate({**same, 2: ["b", ""]})] == [(2,)]
    assert [finding.ranks for finding in evaluate({**same, 2: ["b", ""], 3: ["b", ""]})] == [()]
    assert [finding.ranks for finding in evaluate({**same, 3: ["a", "bucket 0"]})] == [(3,)]
    everyone = evaluate({rank: ["a", "bucket 0"] for rank in range(4)})
    assert [(finding.ranks, finding.cause) for finding in everyone] == [((), "network")]
    assert "all_reduce of 0-3 gave two results for the same input (bucket 0)" in everyone[0].sentence
    scattered = {rank: ["", "blocks.0" if rank == 1 else ""] for rank in range(4)}
    (finding,) = evaluate(scattered, "reduce_scatter 0-3")
    assert (finding.ranks, finding.collective) == ((), "reduce_scatter of 0-3")


@pytest.mark.parametrize(
    "body",
    [
        {"checksums": 3}, {"checksums": {"all_reduce 0-3": []}}, {"checksums": {"broadcast 0-3": {"7": ["a", ""]}}},
        {"checksums": {"all_reduce 0-9": {"7": ["a", ""]}}}, {"checksums": {"all_reduce 1-3": {"7": ["a", ""]}}},
        {"checksums": {"all_reduce 0-3": {"x": ["a", ""]}}}, {"checksums": {"all_reduce 0-3": {"7": ["a"]}}},
        {"checksums": {"all_reduce 0-3": {"7": ["a" * 999, ""]}}}, {"checksums": {"all_reduce 0-3": {"7": [1, 2]}}}, {},
    ],
)  # fmt: skip
def test_messages_that_no_check_has_sent(body: dict[str, Any]) -> None:
    detector = CollectiveChecksums(Job(4))
    detector.take(Message("collective_checksums", 0, 7, body), 1.0)
    assert detector.finish(90.0) == []
    assert detector.job.coverage.to_dict() == {}
