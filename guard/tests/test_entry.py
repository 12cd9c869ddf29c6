"""`dash_guard.guard` and DASH_GUARD in one process; checks of facts, times and data."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dash_guard
from dash_guard.checks.data import Data
from dash_guard.checks.facts import Facts
from dash_guard.checks.stop import Stop
from dash_guard.checks.times import Times
from dash_guard.errors import FaultConfirmedError
from dash_guard.monitor.watching import Watching
from dash_guard.process import settings, start
from dash_guard.process.rank import Rank
from dash_guard.report.findings import Finding
from dash_guard.transport import connect, wire
from dash_guard.transport.channel import Local
from dash_guard.transport.messages import Message
from dash_guard.transport.store import listen
from dash_inductor.errors import ArgumentError, DashError
from dash_inductor.observers import active
from tests.support.processes import run_python

SECRET = "s" * 32


def train(steps: int, seed: int = 0, compiled: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    called = torch.compile(model, backend="eager") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        called(torch.full((2, 4), float(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.fixture
def watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watching]:
    listener = listen(("127.0.0.1", 0))
    monkeypatch.setenv(connect.ADDRESS, "{}:{}".format(*listener.getsockname()))
    found = Watching(tmp_path / "guard", listener, SECRET, lambda finding: None)
    monkeypatch.setenv(wire.SECRET, SECRET)
    yield found
    found.close(0.0)


def test_bad_arguments_are_named() -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"every": 0}, {"at_rest": -1}, {"cross_rank_recompute": 1.5}, {"same_rank_recompute": 101},
        {"collectives": "x"}, {"on_confirmed": "stop"},
        {"live": "no"}, {"same_rank_recompute": True},
        {"folder": None}, {"folder": 3}, {"folder": ""}, {"folder": b"runs"},
    )  # fmt: skip
    for arguments in wrong:
        with pytest.raises(ArgumentError, match=next(iter(arguments))):
            dash_guard.guard(**{"folder": "folder", **arguments})


@pytest.mark.parametrize(
    "text", ["recomputes=1", "at_rest=x", "on_confirmed=stop", "every=0", "same_rank_recompute=101,at_rest=1"]
)
def test_bad_settings_of_the_environment_are_named(text: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    with pytest.raises(ArgumentError):
        settings.parse(text)
    assert settings.parse("") == (settings.DEFAULTS, "warn")
    assert settings.parse("same_rank_recompute=10, on_confirmed=raise") == (
        {**settings.DEFAULTS, "same_rank_recompute": 10},
        "raise",
    )
    monkeypatch.setenv(settings.VARIABLE, text)
    start.from_environment()
    assert "the guard is off" in caplog.text


def test_a_guard_within_a_program(watching: Watching, tmp_path: Path) -> None:
    expected = train(8)
    with dash_guard.guard(tmp_path / "guard") as guard:
        assert all(map(torch.equal, train(8), expected))
        with pytest.raises(DashError, match="already"), dash_guard.guard(tmp_path / "other"):
            pass
        with guard.phase("evaluation"):
            pass
        assert guard.findings == []
        end = time.monotonic() + 20
        while watching.connected < 1 and time.monotonic() < end:
            watching.turn(0.01)
    watching.turn(0.0)
    assert watching.monitor.coverage.to_dict()["facts"]["counts"] == {"ranks": 1}
    assert not [observer for observer in active.observers if isinstance(observer, Rank)]
    assert guard.coverage["facts"]["counts"] == {"ranks": 1}


def test_a_confirmed_fault_ends_training_if_asked_for(watching: Watching, tmp_path: Path) -> None:
    def train_on() -> None:
        end = time.monotonic() + 60
        while watching.job.world < 1 and time.monotonic() < end:
            watching.turn(0.01)
        for severity, cause in (("suspect", "machine"), ("confirmed", "program"), ("confirmed", "machine")):
            found = Finding("bits", severity, f"{severity}: {cause}", ranks=(0,), step=1, cause=cause)
            for detector in watching.monitor.detectors:
                detector.observe(found, 0.0)
        while time.monotonic() < end:
            watching.turn(0.01)
            train(1)

    with dash_guard.guard(tmp_path / "guard", on_confirmed="raise", live=False):
        with pytest.raises(FaultConfirmedError, match="step 1: confirmed: machine"):
            train_on()
        assert len(train(2)) == 4  # once is enough


def events(check: Any, steps: int, compiled: bool = False) -> tuple[Rank, list[Message]]:
    local = Local()
    rank = Rank(0, 1, local.end(0))
    rank.checks.append(check(rank))
    rank.start()
    try:
        train(steps, compiled=compiled)
        for each in rank.checks:
            if isinstance(each, Data):
                each.drain()
    finally:
        rank.close()
    return rank, [message for message in local.receive() if message.kind != "coverage"]


@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_are_hashed_once_a_step_and_differ(compiled: bool) -> None:
    rank, messages = events(Data, 5, compiled)
    assert [message.step for message in messages] == [2, 3, 4, 5]  # the hook is not there yet in the first
    assert len({message.body["digest"] for message in messages}) == 4
    assert messages == events(Data, 5, compiled)[1]
    assert rank.checks[0].name == "data"


def test_each_input_and_the_generator_are_hashed() -> None:
    _, messages = events(Data, 4)
    assert all(list(message.body["tensors"]) == ["input 1"] for message in messages)
    assert len({message.body["tensors"]["input 1"] for message in messages}) == len(messages)
    noise = [message.body["noise"] for message in messages]
    assert {"generator of the CPU", "generator of random", "generator of numpy"} <= set(noise[0])
    assert noise.count(noise[0]) == len(noise)  # nothing is drawn


def test_facts_are_reported_once_and_steps_are_marked() -> None:
    _, facts = events(Facts, 3)
    assert [(message.kind, message.step) for message in facts] == [("facts", 1)]
    assert facts[0].body["facts"]["versions"]["torch"] == torch.__version__
    assert not any("SECRET" in name for name in facts[0].body["facts"]["environment"])
    rank, _ = events(Times, 4)
    (times,) = rank.checks
    assert isinstance(times, Times)
    taken = times.take()
    assert [step for step, _, _ in taken] == [2, 3, 4]
    assert all(begin < end for _, begin, end in taken)
    assert times.take() == []
    assert times.median() > 0


def test_an_order_to_stop_is_carried_out_before_the_next_update_and_once() -> None:
    local = Local()
    rank = Rank(0, 1, local.end(0))
    rank.checks.append(Stop(rank))
    rank.start()
    try:
        local.order((0,), Message("stop", 0, 1, {"sentence": "it is wrong"}))
        with pytest.raises(FaultConfirmedError, match="it is wrong"):
            train(9)
        assert rank.step == 2
        train(2)
    finally:
        rank.close()


def test_from_the_environment_without_a_change_of_the_program(tmp_path: Path) -> None:
    program = """
        import os, time, torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(8, 2)).sum().backward()
            optimizer.step()
        while not os.path.exists(os.path.join(os.environ["DASH_GUARD"], "monitor.json")):
            time.sleep(0.05)
        time.sleep(0.5)
    """
    run_python(program, DASH_GUARD=tmp_path / "guard")
    end, found = time.monotonic() + 60, dict[str, Any]()
    while "at_rest" not in found.get("checks", {}) and time.monotonic() < end:
        time.sleep(0.05)  # the monitor outlives the program by two seconds
        if (tmp_path / "guard" / "coverage.json").exists():
            found = json.loads((tmp_path / "guard" / "coverage.json").read_text())
    assert found["joined"] == found["world"] == 1
    assert found["checks"]["facts"]["counts"] == {"ranks": 1}
    nothing = run_python("import torch; print(torch.ones(1).item())", DASH_GUARD=tmp_path / "nothing")
    assert nothing.stdout == "1.0\n"
    assert not (tmp_path / "nothing").exists()


def test_the_monitor_of_a_program_that_ends_at_once_holds_nobody_up(tmp_path: Path) -> None:
    """Its errors go where those of the program go, and who reads them waits for their end."""
    program = "import sys, dash_guard.transport.connect as c; c.start_monitor(c.Path(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, check=True, timeout=100).stderr == b""


def test_what_starts_a_program_needs_no_torch() -> None:
    code = "import sys, dash_guard.monitor.wrapper, dash_guard.monitor.standalone; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "False\n"


@pytest.mark.parametrize("broken", ["_dash_inductor_autoload.py", "dash_guard/__init__.py"])
@pytest.mark.parametrize("variable", ["DASH_GUARD", "DASH_GUARD_RECORD"])
def test_what_is_broken_does_not_break_the_import_of_torch(broken: str, variable: str, tmp_path: Path) -> None:
    """Nor does it where no variable asks for anything, without a word then."""
    (tmp_path / broken).parent.mkdir(exist_ok=True)
    (tmp_path / broken).write_text("raise RuntimeError('broken on purpose')", encoding="utf-8")
    program = f"""
        import sys, types, warnings
        import _dash_guard_autoload
        sys.path.insert(0, {str(tmp_path)!r})
        for name in [n for n in sys.modules if n.startswith(("dash_guard", "_dash_inductor_autoload"))]:
            del sys.modules[name]
        sys.modules["torch"] = types.ModuleType("torch")  # it has been imported
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _dash_guard_autoload.autoload()
        print(*(str(each.message) for each in said))
    """
    assert "broken on purpose" in run_python(program, **{variable: str(tmp_path / "folder")}).stdout
    assert run_python(program).stdout.strip() == ""
