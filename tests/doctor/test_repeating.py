"""Who does not have what repeats the first step, or has a broken one, is told so; the other checks go on."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch

from dash_inductor.doctor import repeating
from dash_inductor.doctor.step import Step


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ((), "dash_guard, which does that, is not installed"),
        ((EntryPoint("repeat", "no_such_module:Repeat", repeating.GROUP),), "No module named 'no_such_module'"),
        ((EntryPoint("repeat", "builtins:callable", repeating.GROUP),), "builtins:callable is not allowed"),
    ],
)
def test_what_repeats_is_missing(found: tuple[EntryPoint, ...], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeating, "entry_points", lambda **names: found)
    monkeypatch.setattr(Step, "_again", lambda self: ())
    step = Step()
    with step.watched():
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    ((severity, what, advice),) = step.two_runs()
    assert severity.name == "NOTE"
    assert text in what
    assert "dash-inductor[guard]" in advice


def test_nothing_is_said_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeating, "entry_points", lambda **names: ())
    step = Step(repeat=False)
    with step.watched():
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert list(step.two_runs()) == []
