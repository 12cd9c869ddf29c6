"""Roll calls and replays of four processes: planted faults are named, nobody else is, and no bit changes."""

from __future__ import annotations

from typing import Any

import pytest

from .roll_calls import judged, run

FORWARD = {"kind": "forward", "steps": 2}
BACKWARD = {"kind": "backward", "steps": 2}
TRIALS: dict[str, dict[str, Any]] = {
    "clean ddp": {"noisy": True, "steps": 3, "replay": 100},
    "clean fsdp": {"mode": "fsdp", "loss": True, "steps": 2},
    "clean tp": {"mode": "tp", "steps": 2, "replay": 100, "micro_batches": 2},
    "clean compiled": {"compiled": True, "steps": 2, "replay": 100},
    "ddp forward": {**FORWARD, "rank": 2, "module": "blocks.1.up", "bit": 0, "loss": True},
    "ddp backward": {**BACKWARD, "rank": 0, "module": "blocks.0.attn.q", "bit": 30},
    "ddp operator": {"kind": "operator", "rank": 1, "bit": 3, "steps": 2},
    "fsdp forward": {**FORWARD, "mode": "fsdp", "rank": 3, "module": "emb", "bit": 22},
    "fsdp backward": {**BACKWARD, "mode": "fsdp", "rank": 1, "module": "head", "bit": 12},
    "hsdp forward": {**FORWARD, "mode": "hsdp", "rank": 0, "module": "blocks.1.attn.out", "bit": 25},
    "replicate backward": {**BACKWARD, "mode": "replicate", "rank": 2, "module": "blocks.1.down", "bit": 3},
    "compiled forward": {**FORWARD, "compiled": True, "rank": 3, "module": "", "bit": 0},
    "tp forward": {**FORWARD, "mode": "tp", "rank": 2, "module": "blocks.0.up"},
    "unseeded": {"kind": "unseeded", "steps": 2, "replay": 100},
    "set": {"kind": "set", "steps": 2},
    "stop": {"rank": 1, "stop": True, "first": 2, "steps": 3, "every": 0},
    "replayed": {**FORWARD, "rank": 1, "module": "blocks.0.ln1", "once": True, "every": 0, "replay": 100},
    "replayed fsdp": {**BACKWARD, "mode": "fsdp", "rank": 2, "once": True, "every": 0, "replay": 100},
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """By name of the trial; one start of the processes serves all."""
    return dict(zip(TRIALS, run(list(TRIALS.values())), strict=True))


@pytest.mark.parametrize("name", [name for name in TRIALS if name.startswith("clean")])
def test_clean_runs_have_no_finding_and_the_bits_of_unguarded_ones(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    """Parameters, buffers and the state of random numbers, with dropout and BatchNorm in one of them."""
    result = results[name]
    assert result["findings"] == []
    assert result["unchanged"]
    coverage = result["coverage"]
    assert coverage["roll_call"]["counts"]["calls"] == 4 * result["trial"]["steps"]
    assert not coverage["roll_call"]["unseen"]
    if result["trial"]["replay"]:
        assert coverage["replay"]["counts"]["steps"] == 4 * result["trial"]["steps"]


@pytest.mark.parametrize("name", [n for n in TRIALS if n.split()[-1] in ("forward", "backward") and "tp" not in n])
def test_a_defect_that_persists_is_named_at_the_next_roll_call(results: dict[str, dict[str, Any]], name: str) -> None:
    result = results[name]
    assert judged(result) == (True, True, True), result["findings"]
    (found,) = result["findings"]
    assert (found["kind"], len(found["groups"][0]), found["cause"]) == ("roll_call", 3, "machine")
    assert found["severity"] == "verdict"
    assert "it repeats: a defect of this machine" in found["sentence"]


def test_the_operator_is_named_with_its_line(results: dict[str, dict[str, Any]]) -> None:
    (found,) = results["ddp operator"]["findings"]
    assert found["operator"].startswith("dash_inductor_test::between in ")
    assert "roll_called.py:" in found["operator"]
    assert found["evidence"]["inputs of the operator"] == "equal"
    assert (found["severity"], found["ranks"]) == ("verdict", [1])


def test_of_two_ranks_of_the_same_shards_the_one_that_contradicts_itself_is_named(
    results: dict[str, dict[str, Any]],
) -> None:
    (found,) = results["tp forward"]["findings"]
    assert (found["severity"], found["ranks"]) == ("verdict", [2])
    assert found["groups"] == [[0], [2]]


def test_all_ranks_raise_before_the_same_update(results: dict[str, dict[str, Any]]) -> None:
    told, others = "rank 7 computes wrongly", "step 2: another rank was told of a verdict of the guard"
    assert results["stop"]["raised"] == [[[2, others]], [[2, told]], [[2, others]], [[2, others]]]


@pytest.mark.parametrize(("name", "operator"), [("unseeded", "rand"), ("set", "add.Tensor")])
def test_a_program_that_is_not_deterministic_is_named_with_its_operator(
    results: dict[str, dict[str, Any]], name: str, operator: str
) -> None:
    found = results[name]["findings"]
    assert {finding["kind"] for finding in found} == {"nondeterminism"}
    assert all(finding["ranks"] == [] for finding in found)
    assert found[0]["operator"].startswith(operator)
    assert "roll_called.py:" in found[0]["operator"]
    assert results[name]["unchanged"]


@pytest.mark.parametrize("name", ["replayed", "replayed fsdp"])
def test_a_fault_that_strikes_once_is_found_by_a_replay(results: dict[str, dict[str, Any]], name: str) -> None:
    assert judged(results[name]) == (True, True, True), results[name]
    (found,) = results[name]["findings"]
    assert "struck once" in found["sentence"]
