"""Cross-rank recomputes and same-rank recomputes of four processes: planted faults are named, nobody else is, and no
bit changes.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from dash_guard.checks.cross_rank_recompute import CrossRankRecompute
from dash_guard.checks.same_rank_recompute import SameRankRecompute
from dash_guard.detectors.cross_rank_recompute import CrossRankRecomputeDetector
from dash_guard.detectors.detector import Job
from dash_guard.fingerprints.lane_buffer import LaneBuffer
from dash_guard.monitor.monitor import Monitor
from dash_guard.process.rank import Rank
from dash_guard.transport.channel import Local

from .recompute_campaign import run, scored

FORWARD = {"kind": "forward", "steps": 2}
BACKWARD = {"kind": "backward", "steps": 2}
TRIALS: dict[str, dict[str, Any]] = {
    "clean ddp": {"noisy": True, "steps": 3, "same_rank_recompute": 100},
    "clean fsdp": {"mode": "fsdp", "loss": True, "steps": 2},
    "clean tp": {"mode": "tp", "steps": 2, "same_rank_recompute": 100, "micro_batches": 2},
    "clean compiled": {"compiled": True, "steps": 2, "same_rank_recompute": 100},
    "ddp forward": {**FORWARD, "rank": 2, "module": "blocks.1.up", "bit": 0, "loss": True},
    "ddp backward": {**BACKWARD, "rank": 0, "module": "blocks.0.attn.q", "bit": 30},
    "ddp operator": {"kind": "operator", "rank": 1, "bit": 3, "steps": 2},
    "fsdp forward": {**FORWARD, "mode": "fsdp", "rank": 3, "module": "emb", "bit": 22},
    "fsdp backward": {**BACKWARD, "mode": "fsdp", "rank": 1, "module": "head", "bit": 12},
    "hsdp forward": {**FORWARD, "mode": "hsdp", "rank": 0, "module": "blocks.1.attn.out", "bit": 25},
    "replicate backward": {**BACKWARD, "mode": "replicate", "rank": 2, "module": "blocks.1.down", "bit": 3},
    "compiled forward": {**FORWARD, "compiled": True, "rank": 3, "module": "", "bit": 0},
    "tp forward": {**FORWARD, "mode": "tp", "rank": 2, "module": "blocks.0.up"},
    "tp local": {**FORWARD, "kind": "local", "mode": "tp", "rank": 2, "module": "blocks.0.up"},
    "unseeded": {"kind": "unseeded", "steps": 2, "same_rank_recompute": 100},
    "set": {"kind": "set", "steps": 2},
    "stop": {"rank": 1, "stop": True, "first": 2, "steps": 3, "every": 0},
    "stop parted": {"kind": "reduced", "rank": 2, "module": "blocks.1.up", "stop": True, "steps": 3, "every": 0},
    "off": {**FORWARD, "rank": 2, "module": "blocks.1.up", "bit": 0, "every": 0},
    "off once": {**FORWARD, "rank": 1, "module": "blocks.0.ln1", "once": True, "every": 0},
    "repeated": {**FORWARD, "rank": 1, "module": "blocks.0.ln1", "once": True, "every": 0, "same_rank_recompute": 100},
    "repeated tp": {
        **FORWARD,
        "mode": "tp",
        "rank": 3,
        "module": "blocks.1.up",
        "once": True,
        "every": 0,
        "same_rank_recompute": 100,
    },
    "repeated fsdp": {
        **BACKWARD,
        "mode": "fsdp",
        "rank": 2,
        "module": "blocks.1.up",
        "once": True,
        "every": 0,
        "same_rank_recompute": 100,
    },
}


QUICK = ("clean ddp", "ddp forward", "stop", "stop parted", "repeated", "off", "off once")


def marked(*names: str) -> list[Any]:
    """Names of trials, of which those that are not quick are for full runs."""
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in names]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """By name of the trial; one start of the processes serves all that are wanted."""
    full = any(item.path == request.path and item.get_closest_marker("full") for item in request.session.items)
    names = [name for name in TRIALS if full or name in QUICK]
    return dict(zip(names, run([TRIALS[name] for name in names]), strict=True))


@pytest.mark.parametrize("name", marked(*(name for name in TRIALS if name.startswith("clean"))))
def test_clean_runs_have_no_finding_and_the_bits_of_unguarded_ones(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    """Parameters, buffers and the state of random numbers, with dropout and BatchNorm in one of them."""
    result = results[name]
    assert result["findings"] == []
    assert result["unchanged"]
    coverage = result["coverage"]
    assert coverage["cross_rank_recompute"]["counts"]["calls"] == 4 * result["trial"]["steps"]
    assert not coverage["cross_rank_recompute"]["unseen"]
    if result["trial"]["same_rank_recompute"]:
        assert coverage["same_rank_recompute"]["counts"]["steps"] == 4 * result["trial"]["steps"]


@pytest.mark.parametrize(
    "name", marked(*(n for n in TRIALS if n.split()[-1] in ("forward", "backward") and "tp" not in n))
)
def test_a_defect_that_persists_is_named_at_the_next_cross_rank_recompute(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    result = results[name]
    assert scored(result) == (True, True, True), result["findings"]
    (found,) = result["findings"]
    seen = not result["trial"]["compiled"]  # the operators of compiled code are not
    assert (found["kind"], len(found["groups"][0])) == ("cross_rank_recompute", 3)
    assert (found["severity"], found["cause"]) == (("confirmed", "machine") if seen else ("suspect", "unknown"))
    assert ("it repeats: a defect of this machine" in found["sentence"]) == seen
    assert ("the program or the machine may do it" in found["sentence"]) != seen


@pytest.mark.full
def test_the_operator_is_named_with_its_line(results: dict[str, dict[str, Any]]) -> None:
    (found,) = results["ddp operator"]["findings"]
    assert found["operator"].startswith("dash_inductor_test::between in ")
    assert "recomputed.py:" in found["operator"]
    assert found["evidence"]["inputs of the operator"] == "equal"
    assert (found["severity"], found["ranks"]) == ("confirmed", [1])


@pytest.mark.parametrize("name", ["off", "off once"])
def test_the_same_faults_are_not_seen_without_the_check(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["findings"] == []
    assert results[name]["coverage"]["cross_rank_recompute"]["counts"]["calls"] == 4, "the preflight in the first step"


@pytest.mark.full
@pytest.mark.parametrize("kind", ["forward", "local"])
def test_of_two_ranks_of_the_same_shards_the_one_that_contradicts_itself_is_named(
    results: dict[str, dict[str, Any]], kind: str
) -> None:
    (found,) = results[f"tp {kind}"]["findings"]
    assert (found["severity"], found["ranks"]) == ("confirmed", [2])
    assert found["groups"] == [[0], [2]]


def test_all_ranks_raise_before_the_same_update(results: dict[str, dict[str, Any]]) -> None:
    own, others = "rank 7 computes wrongly", "step 2: another rank received a confirmed finding"
    assert results["stop"]["raised"] == [[[2, others]], [[2, own]], [[2, others]], [[2, others]]]
    assert results["stop"]["coverage"]["stop"]["counts"]["steps"] == 4 * 2


def test_all_ranks_raise_before_an_update_with_gradients_that_are_not_equal(results: dict[str, dict[str, Any]]) -> None:
    words = "step 2: rank 2 and ranks 0, 1 and 3 must be equal, and differ in gradient blocks.1.up.weight"
    assert results["stop parted"]["raised"] == [[[2, words]]] * 4


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "kind", "operator"), [("unseeded", "guard", "rand"), ("set", "nondeterminism", "add.Tensor")]
)
def test_a_program_that_is_not_deterministic_is_named_with_its_operator(
    results: dict[str, dict[str, Any]], name: str, kind: str, operator: str
) -> None:
    found = results[name]["findings"]
    assert {finding["kind"] for finding in found} == {kind}
    assert all(finding["ranks"] == [] for finding in found)
    assert found[0]["operator"].startswith(operator)
    assert "recomputed.py:" in found[0]["operator"]
    assert results[name]["unchanged"]


@pytest.mark.parametrize("name", marked("repeated", "repeated tp", "repeated fsdp"))
def test_a_fault_that_strikes_once_is_found_by_a_same_rank_recompute(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    assert scored(results[name]) == (True, True, True), results[name]
    (found,) = results[name]["findings"]
    assert "struck once" in found["sentence"]


def test_a_function_of_the_program_is_called_by_a_cross_rank_recompute_and_leaves_nothing_behind() -> None:
    local = Local()
    rank = Rank(0, 1, local.end(0))
    rank.checks = [check := CrossRankRecompute(rank)]
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator, calls = torch.Generator(), 0

    def work() -> None:
        nonlocal calls
        calls += 1
        model(torch.randn(3, 4) + noise * torch.randn(3, 4, generator=generator)).sum().backward()

    noise = 0.0
    rank.start()
    try:
        work()
        optimizer.step()
        before = [tensor.clone() for tensor in (*model.buffers(), torch.get_rng_state())]
        gradients = [parameter.grad for parameter in model.parameters()]
        calls, noise = 0, 1.0
        check.run_now(work)
        assert calls == 2 + 2, "the second run of both differs, so that operators are named"
        assert all(map(torch.equal, before, (*model.buffers(), torch.get_rng_state())))
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    finally:
        rank.close()
    job = Job(1)
    monitor = Monitor(job, local, [CrossRankRecomputeDetector(job)], None, lambda finding: None, lambda: 0.0)
    (found,) = monitor.turn(0.0)
    assert (found.kind, found.ranks) == ("guard", ())
    assert "cannot be run again" in found.sentence
    assert found.operator.startswith("randn.generator in ")


def test_what_cannot_be_sent_or_fails_is_said_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor, how: object = None) -> torch.Tensor:
            return super().forward(x)

    def train(*given: object) -> dict[str, Any]:
        rank = Rank(0, 1, Local().end(0))
        rank.checks = [
            CrossRankRecompute(rank, cross_rank_recompute=1),
            SameRankRecompute(rank, same_rank_recompute=100),
        ]
        rank.start()
        model = Odd(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 2), *given).sum().backward()
            optimizer.step()
        rank.close()
        return rank.coverage.to_dict()

    healthy = train()
    assert healthy["cross_rank_recompute"]["counts"]["calls"] == healthy["same_rank_recompute"]["counts"]["steps"] == 2
    assert train(object())["cross_rank_recompute"]["unseen"] == {"an argument of type object": 2}
    monkeypatch.setattr(LaneBuffer, "add", Mock(side_effect=torch.OutOfMemoryError("no memory for lanes")))
    failing = train()
    for check in ("cross_rank_recompute", "same_rank_recompute"):
        (why,) = failing[check]["unseen"]
        assert "no memory for lanes" in why
