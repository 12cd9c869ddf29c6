"""Doors of collectives on several processes: broken wires are named, no bit changes, a program's own ways are kept."""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest

from dash_guard.detectors.judge import Job
from dash_guard.detectors.wires import Wires
from dash_guard.report.findings import Finding
from dash_guard.transport.messages import Message

from .support import wired
from .support.wired import AT, OUTPUT, Trial

REDUCE, SCATTER, GATHER = "allreduce_", "_reduce_scatter_base_", "_allgather_base_"
CLEAN = {mode: Trial(mode) for mode in ("ddp", "replicate", "fsdp")}
OWN = {mode: Trial(mode, own=True) for mode in ("ddp", "fsdp")}
WIRES = {
    "all_reduce of 0-2": Trial("ddp", 1, REDUCE, number=3),  # the bucket that this backward repeats
    "one result of all_reduce of 0-2": Trial("ddp", 1, REDUCE, OUTPUT),
    "reduce_scatter of 0-2": Trial("fsdp", 1, SCATTER, number=2),
    "all_gather of 0-2 in the backward": Trial("fsdp", 1, GATHER, OUTPUT, number=4),
    "all_gather of 0-2 in the forward": Trial("compiled fsdp", 1, GATHER, OUTPUT, number=1),
}
QUICK = ("all_reduce of 0-2", "reduce_scatter of 0-2", "all_gather of 0-2 in the backward")
QUICK_CLEAN, QUICK_OWN = ("ddp", "fsdp"), ("ddp",)


def off(trial: Trial) -> Trial:
    return Trial(trial.mode, 0, trial.wire, trial.side, trial.number, trial.own)


def marked(names: Iterable[str], quick: Container[str]) -> list[Any]:
    """Parameters of a test, of which those that are not quick are for full runs."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.full) for name in names]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Trial, dict[str, Any]]:
    """All trials that are wanted, and the same without doors, of one set of processes."""
    full = any(item.path == request.path and item.get_closest_marker("full") for item in request.session.items)
    kinds = ((CLEAN, QUICK_CLEAN), (OWN, QUICK_OWN), (WIRES, QUICK))
    wanted = [of[name] for of, quick in kinds for name in (of if full else quick)]
    trials = list(dict.fromkeys([*wanted, *map(off, wanted)]))
    return dict(zip(trials, wired.run(trials, tmp_path_factory.mktemp("wired")), strict=True))


@pytest.mark.parametrize("mode", marked(CLEAN, QUICK_CLEAN))
def test_doors_change_no_bit_and_name_nobody(results: dict[Trial, dict[str, Any]], mode: str) -> None:
    """Of three ranks, in accumulated steps too, and of gradients behind the end of the guard."""
    with_doors, without = results[CLEAN[mode]], results[off(CLEAN[mode])]
    assert with_doors["bits"] == without["bits"]
    assert (with_doors["findings"], with_doors["off"], without["coverage"]) == ([], [], {})
    coverage = with_doors["coverage"]
    assert coverage["wires"]["counts"]["repeated"] >= 12
    assert coverage["wires"]["counts"]["compared"] == 3 * 4
    assert not any(entry["unseen"] for entry in coverage.values())


@pytest.mark.parametrize("name", marked(WIRES, QUICK))
def test_a_broken_wire_is_named_with_its_collective(results: dict[Trial, dict[str, Any]], name: str) -> None:
    """The negative control: the same wire, the same wrong bits, and no door."""
    broken, unseen = results[WIRES[name]], results[off(WIRES[name])]
    (finding,) = broken["findings"]
    assert (finding["kind"], finding["step"]) == ("door", AT)
    assert finding["collective"] == name.removeprefix("one result of ")
    assert finding["ranks"] == ([1] if WIRES[name].side == OUTPUT else [])
    assert broken["bits"] == unseen["bits"]
    assert unseen["findings"] == []


@pytest.mark.parametrize("mode", marked(OWN, QUICK_OWN))
def test_a_programs_own_way_to_communicate_is_kept(results: dict[Trial, dict[str, Any]], mode: str) -> None:
    with_doors, without = results[OWN[mode]], results[off(OWN[mode])]
    assert with_doors["bits"] == without["bits"]
    assert (with_doors["bits"] == results[CLEAN[mode]]["bits"]) == (mode == "fsdp")  # it halves gradients of DDP
    why = {"ddp": "has a comm hook of its own", "fsdp": "has its own way to reduce"}[mode]
    (unseen,) = with_doors["coverage"]["wires"]["unseen"]
    assert unseen.endswith(f"the program {why}")
    assert "repeated" not in with_doors["coverage"]["wires"]["counts"]


@pytest.mark.full
def test_hsdp_has_doors_when_it_is_compiled(tmp_path: Path) -> None:
    clean, gathered = wired.run(
        [Trial("compiled hsdp"), Trial("compiled hsdp", 1, GATHER, OUTPUT, number=4)], tmp_path, world=4
    )
    assert clean["findings"] == []
    assert clean["coverage"]["doors"]["counts"]["compared"] > 0
    assert clean["coverage"]["wires"]["counts"]["repeated"] > 0
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
    """Trials of two pairs of shards, and the same without doors."""
    wanted = [*map(Trial, HSDP), Trial("hsdp", own=True), *BETWEEN.values()]
    trials = [*wanted, *map(off, wanted)]
    return dict(zip(trials, wired.run(trials, tmp_path_factory.mktemp("between"), world=4), strict=True))


@pytest.mark.full
@pytest.mark.parametrize("mode", HSDP)
def test_doors_between_groups_of_shards_change_no_bit(between: dict[Trial, dict[str, Any]], mode: str) -> None:
    with_doors, without = between[Trial(mode)], between[off(Trial(mode))]
    assert with_doors["bits"] == without["bits"]
    assert (with_doors["findings"], with_doors["off"]) == ([], [])
    counts = with_doors["coverage"]["wires"]["counts"]
    assert counts["results"] >= 4 * 4 * 3
    assert counts["repeated"] >= 4 * 4 * 2
    assert not with_doors["coverage"]["wires"]["unseen"]


@pytest.mark.full
@pytest.mark.parametrize("name", BETWEEN)
def test_a_broken_wire_between_groups_of_shards_is_named(between: dict[Trial, dict[str, Any]], name: str) -> None:
    broken, unseen = between[BETWEEN[name]], between[off(BETWEEN[name])]
    (finding,) = broken["findings"]
    assert (finding["kind"], finding["step"], finding["collective"]) == ("door", AT, "all_reduce of 1,3")
    assert ("gave two results" in finding["sentence"]) == (BETWEEN[name].side != OUTPUT)
    assert finding["ranks"] == []
    assert broken["bits"] == unseen["bits"]
    assert unseen["findings"] == []
    assert broken["bits"] != between[Trial(BETWEEN[name].mode)]["bits"]


@pytest.mark.full
def test_a_programs_own_way_to_scatter_has_no_door_behind_it(between: dict[Trial, dict[str, Any]]) -> None:
    with_doors, without = (between[trial] for trial in (Trial("hsdp", own=True), off(Trial("hsdp", own=True))))
    assert with_doors["bits"] == without["bits"]
    assert {why.split(" of ")[0] for why in with_doors["coverage"]["wires"]["unseen"]} == {
        "all_reduce",
        "reduce_scatter",
    }


def judged(told: dict[int, list[str]], where: str = "all_reduce 0-3") -> list[Finding]:
    judge = Wires(Job(4))
    for rank, of in told.items():
        judge.take(Message("wires", rank, 7, {"wires": {where: {"7": of}}}), 1.0)
    return judge.judge(2.0)


def test_who_is_named() -> None:
    same = {rank: ["a", ""] for rank in range(4)}
    assert judged(same) == []
    assert [finding.ranks for finding in judged({**same, 2: ["b", ""]})] == [(2,)]
    assert [finding.ranks for finding in judged({**same, 2: ["b", ""], 3: ["b", ""]})] == [()]
    assert [finding.ranks for finding in judged({**same, 3: ["a", "bucket 0"]})] == [(3,)]
    everyone = judged({rank: ["a", "bucket 0"] for rank in range(4)})
    assert [(finding.ranks, finding.cause) for finding in everyone] == [((), "wire")]
    assert "all_reduce of 0-3 gave two results for the same input (bucket 0)" in everyone[0].sentence
    scattered = {rank: ["", "blocks.0" if rank == 1 else ""] for rank in range(4)}
    (finding,) = judged(scattered, "reduce_scatter 0-3")
    assert (finding.ranks, finding.collective) == ((), "reduce_scatter of 0-3")


@pytest.mark.parametrize(
    "body",
    [
        {"wires": 3}, {"wires": {"all_reduce 0-3": []}}, {"wires": {"broadcast 0-3": {"7": ["a", ""]}}},
        {"wires": {"all_reduce 0-9": {"7": ["a", ""]}}}, {"wires": {"all_reduce 1-3": {"7": ["a", ""]}}},
        {"wires": {"all_reduce 0-3": {"x": ["a", ""]}}}, {"wires": {"all_reduce 0-3": {"7": ["a"]}}},
        {"wires": {"all_reduce 0-3": {"7": ["a" * 999, ""]}}}, {"wires": {"all_reduce 0-3": {"7": [1, 2]}}}, {},
    ],
)  # fmt: skip
def test_messages_that_no_check_has_sent(body: dict[str, Any]) -> None:
    judge = Wires(Job(4))
    judge.take(Message("wires", 0, 7, body), 1.0)
    assert judge.finish(90.0) == []
    assert judge.job.coverage.to_dict() == {}
