"""`DeterministicTracker` with Accelerate, on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor import config
from dash_inductor.errors import FallbackError

from ..support.trained import WIDTH, Model, on_the_cpu, told  # noqa: F401  # a fixture of every test

pytest.importorskip("accelerate", reason="the Accelerator is Accelerate's")

import accelerate
from accelerate.state import AcceleratorState, GradientState

from dash_inductor.integrations.accelerate import DeterministicTracker, _log


@pytest.fixture(autouse=True)
def as_before(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Accelerate keeps its state for the process."""
    caplog.set_level(logging.INFO, logger=_log.name)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(tracker: Any, *, compiled: bool = True, dtype: torch.dtype = torch.float32, path: Any = None) -> Tensor:
    """The trained weight.

    Args:
        path: of a checkpoint, with which training begins if it exists; else it is saved after the first step.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    backend = "inductor" if compiled else "no"
    accelerator = accelerate.Accelerator(
        cpu=True, dynamo_backend=backend, log_with=[tracker], gradient_accumulation_steps=2
    )
    accelerator.init_trackers("run")
    model = Model(dtype, dropout=0.5)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    first = 0
    if path is not None and path.exists():
        accelerator.load_state(str(path))
        first = 2
    for step in range(first, 4):
        with accelerator.accumulate(model):
            loss = model(torch.ones(1, 2, 32, WIDTH)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)
        if path is not None and step == 1 and first == 0:
            accelerator.save_state(str(path))
    accelerator.end_training()
    return accelerator.unwrap_model(model, keep_torch_compile=False).weight.detach()


def test_a_training(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One message; the same bits again and from a checkpoint; other bits with another seed; then no flag."""
    weights = []
    for seed, path in ((3, tmp_path / "state"), (3, tmp_path / "state"), (3, None), (4, None)):
        torch._dynamo.reset()
        caplog.clear()
        weights.append(train(DeterministicTracker(seed=seed, strict=True), path=path))
        ((level, text),) = told(caplog, _log)
        assert level == logging.INFO
        assert text.endswith("dash_inductor: 1 of 1 attentions replaced")
        assert not torch.are_deterministic_algorithms_enabled()
        assert not config.strict
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])


@pytest.mark.parametrize("compiled", [False, True])
def test_strict(compiled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """No attention at all, or what is kept; `tracker.end` restores the settings after an exception."""
    tracker = DeterministicTracker(strict=True)
    with pytest.raises(FallbackError, match="not replaced, dtype" if compiled else 'dynamo_backend="inductor"'):
        train(tracker, compiled=compiled, dtype=torch.float64)
    tracker.tracker.end()
    assert not torch.are_deterministic_algorithms_enabled()
    assert not config.strict


def test_a_tracker_that_is_used_again_and_a_rank_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker begins again after its end; on other ranks, which have none, it ends when the next is made."""
    tracker = DeterministicTracker()
    for _ in range(2):
        train(tracker, compiled=False)
        assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv("RANK", "1")
    trackers = [DeterministicTracker(strict=strict) for strict in (True, False)]
    assert [each.tracker.is_running for each in trackers] == [False, True]
    assert torch.are_deterministic_algorithms_enabled()
    assert not config.strict
    trackers[1].finish()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_variable_is_set_too_late(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, when the tracker is made."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "memory_reserved", lambda device: 1 << 21)
        tracker = DeterministicTracker()
    train(tracker, compiled=False)
    assert sum("is set too late" in record.getMessage() for record in caplog.records) == 1


def test_recording(tmp_path: Any) -> None:
    guard = pytest.importorskip("dash_guard")
    for name in "ab":
        train(DeterministicTracker(record=tmp_path / name), compiled=False)
    compared = guard.compare(tmp_path / "a", tmp_path / "b")
    assert (compared.verdict, compared.steps) == ("equal", 2)
