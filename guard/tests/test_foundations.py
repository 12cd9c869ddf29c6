"""The parts that every check and detector of the guard stands on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dash_guard.checks.check import Check
from dash_guard.detectors.detector import Detector, Job
from dash_guard.errors import RecordingError
from dash_guard.monitor.monitor import Monitor
from dash_guard.process.group import Group
from dash_guard.process.rank import Rank
from dash_guard.report.findings import Finding, from_json, read
from dash_guard.transport.channel import Local
from dash_guard.transport.messages import SIZE, Message, decode
from dash_guard.upstream import collectives
from dash_inductor.errors import ArgumentError
from dash_inductor.untrusted import Refused


class Counts(Check):
    name = "bits"

    def step_done(self, step: int) -> None:
        self.send(step, digest="00")
        self.rank.coverage.count(self.name, steps=1)


class Breaks(Check):
    name = "at_rest"

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        raise RuntimeError("no memory for digests")


class Second(Detector):
    kinds = frozenset({"bits"})

    def take(self, message: Message, now: float) -> None:
        if message.step == 2:
            self.found = [Finding("bits", "suspect", f"step 2 of rank {message.rank}", ranks=(message.rank,), step=2)]

    def detect(self, now: float) -> list[Finding]:
        found, self.found = getattr(self, "found", []), []
        return found


def train(steps: int, optimizers: int = 1) -> None:
    model = torch.nn.Linear(2, 2)
    by = [torch.optim.SGD([parameter], 0.1) for parameter in list(model.parameters())[:optimizers]]
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        for optimizer in by:
            optimizer.step()


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_run_of_one_rank_from_event_to_file(tmp_path: Path, optimizers: int) -> None:
    local, published = Local(), list[Finding]()
    rank = Rank(0, 1, local.end(0))
    rank.checks = [Breaks(rank), Counts(rank)]
    rank.start()
    try:
        train(3, optimizers)
    finally:
        rank.close()
    job = Job(1, hosts={0: "node"})
    monitor = Monitor(job, local, [Second(job)], tmp_path, published.append, lambda: 7.0)
    (found,) = monitor.turn(0.0)
    assert monitor.finish(1.0) == []
    assert (found.hosts, found.time, published) == (("node",), 7.0, [found])
    assert read(tmp_path) == [found]
    assert monitor.coverage.to_dict()["bits"]["counts"] == {"steps": 3}
    assert "no memory for digests" in next(iter(monitor.coverage.to_dict()["at_rest"]["unseen"]))


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'["bits",1,1]', b'["bits",-1,1,{}]', b'["bits",4,1,{}]', b'["a b",1,1,{}]', b'["bits",true,1,{}]',
     b'["bits",1,1,{"a":NaN}]', b"[" * 9000, b'"' + b"x" * SIZE + b'"', b"\xff"],
)  # fmt: skip
def test_bytes_that_are_no_message_are_refused(content: bytes) -> None:
    with pytest.raises(Refused):
        decode(content, world=4)


def test_messages() -> None:
    message = Message("cross_rank_recompute", 3, 12, {"roots": ["00ff"]})
    assert decode(message.encode(), world=4) == message
    with pytest.raises(ArgumentError, match="at most"):
        Message("bits", 0, 1, {"x": "y" * SIZE}).encode()


@pytest.mark.parametrize(
    "changed", [{"v": 2}, {"kind": "else"}, {"ranks": [1 << 20]}, {"ranks": [True]}, {"step": "1"}, {"more": 1}]
)
def test_a_file_of_findings_that_somebody_else_wrote(tmp_path: Path, changed: dict[str, object]) -> None:
    good = Finding("hang", "confirmed", "rank 1\x1b[31m waits", ranks=(1,)).to_json()
    assert from_json(good.encode()).sentence == "rank 1\\x1b[31m waits"
    (tmp_path / "findings.jsonl").write_text(json.dumps({**json.loads(good), **changed}))
    with pytest.raises(RecordingError):
        read(tmp_path)


def test_a_folder_without_findings(tmp_path: Path) -> None:
    assert read(tmp_path) == []
    with pytest.raises(ArgumentError, match="severity"):
        Finding("bits", "sure", "x")  # type: ignore[arg-type]


def test_the_flight_recorder_of_every_backend_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """From torch 2.15 on, each backend has one, and "nccl" is a backend whose name is another."""
    asked = []

    def dump(collectives: bool, active: bool, backend: str = "gloo") -> str:
        """(..., backend: str = 'gloo') -> bytes"""
        asked.append(backend)
        entry = {"process_group": [backend, ""], "op_id": 1, "time_created_ns": len(asked)}
        return json.dumps({"entries": [entry]} if backend in ("nccl2", "another") else {})

    monkeypatch.setattr(collectives, "is_up", lambda: True)
    monkeypatch.setattr(collectives.compat, "resolve", lambda module, name: dump)
    monkeypatch.setattr(
        type(collectives.dist.distributed_c10d._world), "pg_map", {object(): ("cpu:gloo,cuda:another", None)}
    )
    found = [entry["process_group"][0] for entry in collectives.entries()]
    assert found == ["another", "nccl2"] * 2  # both names of the function
    assert asked == ["another", "gloo", "nccl-lazy", "nccl2"] * 2


@pytest.mark.parametrize("first", [1, 2, 7, 64, 1000])
def test_ranks_that_wait_for_another_one_lose_two_seconds_in_all(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the step of the first try, as after a resumption."""
    waited: dict[int, float] = {}

    def meet(name: str, settings: str, patience: float, timeout: object) -> object:
        waited[int(name.split("/")[1])] = patience
        raise collectives.NotAllCame

    monkeypatch.setattr(collectives, "is_up", lambda: True)
    monkeypatch.setattr(collectives, "meet", meet)
    group = Group()
    answers = [group.open(step) for step in range(first, first + 2000)]
    assert sum(waited.values()) == pytest.approx(2.0)
    assert len(waited) == 11
    assert min(waited) == first
    assert answers[0] is None
    assert answers[-1] == "not all ranks have a guard"
