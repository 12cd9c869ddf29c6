"""Observers get the events of a training run, several at once, and only while they are active."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dash_guard
from dash_guard.recorder.recorder import Recorder
from dash_guard.recorder.replicas import Replicas
from dash_inductor.config import config
from dash_inductor.errors import DashError
from dash_inductor.observers import active, hooks, phases
from dash_inductor.observers.observer import Observer, Seen
from tests.support.blocks import Model


class Listening(Observer):
    """Writes down the events that it gets."""

    def __init__(self, watches_graphs: bool = False) -> None:
        self.watches_graphs = watches_graphs
        self.heard: list[str] = []

    def module_begins(self, module: nn.Module) -> None:
        self.heard.append(f"{type(module).__name__} begins")

    def module_ended(self, module: nn.Module, result: Any) -> None:
        self.heard.append(f"{type(module).__name__} ended" + ("" if isinstance(result, Tensor) else " by an exception"))

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.heard.append("before the optimizer")

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.heard.append("after the optimizer")

    def prepare(self, device: torch.device) -> None:
        self.heard.append(f"a graph on {device.type}")

    def seen(self, event: Seen) -> None:
        self.heard.append(f"{event.phase} of {[name for names, _ in event.lanes for name in names]}")

    def step_ended(self, step: int) -> None:
        self.heard.append(f"step {step} ended")

    def check(self) -> None:
        self.heard.append("check")

    def close(self) -> None:
        self.heard.append("closed")

    def attention_gradients(self, gradients: Sequence[tuple[str, Tensor]]) -> None:
        self.heard += [name.split()[-1] for name, _ in gradients]


@pytest.fixture
def listen() -> Iterator[Callable[..., Listening]]:
    """Makes observers that are active until the end of the test."""
    made: list[Observer] = []

    def begin(**arguments: Any) -> Listening:
        observer = Listening(**arguments)
        made.append(observer)
        active.observers.append(observer)
        hooks.install()
        return observer

    yield begin
    for observer in made:
        active.observers.remove(observer)


def train(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call(x).sum().backward()
    optimizer.step()


STEP = ["Linear begins", "Linear ended", "before the optimizer", "after the optimizer"]


def test_events_of_eager_code(listen: Callable[..., Listening]) -> None:
    first, model = listen(), nn.Linear(2, 2)
    train(model, model, torch.ones(1, 2))
    second = listen()
    train(model, model, torch.ones(1, 2))
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert first.heard == STEP + STEP + ["Linear begins", "Linear ended by an exception"]
    assert second.heard == first.heard[len(STEP) :]


def test_an_observer_during_a_recording(listen: Callable[..., Listening], tmp_path: Path) -> None:
    observer, model = listen(), nn.Linear(2, 2)
    with dash_guard.record(tmp_path):
        train(model, model, torch.ones(1, 2))
        with pytest.raises(DashError, match="is on already"):
            dash_guard.record(tmp_path / "another").__enter__()
    train(model, model, torch.ones(1, 2))
    forward, (before, after) = STEP[:2], STEP[2:]
    assert observer.heard == [*forward, before, "check", after, "step 1 ended", "check", *STEP]


def test_a_recording_shows_phases_to_other_observers(listen: Callable[..., Listening], tmp_path: Path) -> None:
    """Those of recorded steps, with lanes; the recording closes no observer that is not its own."""
    observer, model = listen(), nn.Linear(2, 2)
    observer.phases = frozenset({phases.PARAMETER})
    with dash_guard.record(tmp_path, every=2):
        for _ in range(3):
            train(model, model, torch.ones(1, 2))
    heard_ = [heard for heard in observer.heard if heard not in STEP]
    step = ["check", "parameter of ['weight', 'bias']"]
    assert heard_ == [*step, "step 1 ended", *step, "step 3 ended", "check"]


def test_the_replica_check_is_an_observer_of_its_own(tmp_path: Path) -> None:
    for replicas, kinds in (("warn", [Recorder, Replicas]), ("off", [Recorder])):
        with dash_guard.record(tmp_path / replicas, replicas=replicas):  # type: ignore[arg-type]
            assert [type(observer) for observer in active.observers] == kinds
        assert not active.observers


@pytest.mark.parametrize("watches", [False, True])
def test_gradients_of_graphs_go_to_observers_that_watch_graphs(
    watches: bool, listen: Callable[..., Listening], deterministic: None
) -> None:
    config.cpu = "reference"
    observer, model = listen(watches_graphs=watches), Model(head_dim=16)
    torch.compile(model, fullgraph=True)(torch.ones(2, 16, 32)).backward()
    gradients = [heard for heard in observer.heard if heard in ("dQ", "dK", "dV")]
    assert gradients == ["dQ", "dK", "dV"] * 2 * watches
    assert ("a graph on cpu" in observer.heard) == watches
