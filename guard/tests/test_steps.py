"""Steps are counted by optimizer, however many of them take turns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dash_guard.checks.check import Check
from dash_guard.checks.classes import Classes
from dash_guard.checks.state import State
from dash_guard.process.rank import Rank
from dash_guard.transport.channel import Local


class Counting(Check):
    """Writes down in which step each optimizer steps."""

    name = "counting"

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self.steps: dict[int, list[int]] = {}

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps.setdefault(id(optimizer), []).append(self.rank.step)


@pytest.mark.parametrize("pattern", ["a", "ab", "abc", "aab", "aaaaab", "aba", "abb"])
@pytest.mark.parametrize("forwards", ["before each", "before all"])
def test_steps_are_counted_by_optimizer(pattern: str, forwards: str) -> None:
    models = {name: nn.Linear(2, 2) for name in pattern}
    by = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    rank = Rank(0, 1, Local().end(0))
    rank.checks = [counting := Counting(rank)]
    rank.start()
    times = 6
    for _ in range(times):
        if forwards == "before all":
            sum(model(torch.ones(2)).sum() for model in models.values()).backward()
        for name in pattern:
            if forwards == "before each":
                models[name](torch.ones(2)).sum().backward()
            by[name].step()
    rank.close()
    most = max(pattern.count(name) for name in pattern)
    for name, optimizer in by.items():
        steps = counting.steps[id(optimizer)]
        assert steps == sorted(steps)
        if pattern.count(name) == most:  # the one that steps most often counts
            assert steps == list(range(1, most * times + 1))
        else:
            assert steps[-1] <= most * times + 1


def test_an_optimizer_that_takes_the_place_of_another_one_goes_on() -> None:
    model = nn.Linear(2, 2)
    rank = Rank(0, 1, Local().end(0))
    rank.checks = [counting := Counting(rank)]
    rank.start()
    second = []
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.2)):
        for _ in range(4):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        second = counting.steps[id(optimizer)]
    rank.close()
    assert second == [4, 5, 6, 7]


def test_an_optimizer_of_a_model_that_no_other_rank_has_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank tunes a copy between its steps; without declared replicas, nobody knows whose optimizer it is."""
    shared, norm, copied = nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)
    model = nn.Sequential(shared, norm)
    for declared in (True, False):
        rank = Rank(0, 2, Local().end(0))
        rank.checks = [counting := Counting(rank)]
        holders = {id(each): (0, 1) for each in shared.parameters()} if declared else {}
        monkeypatch.setattr(Classes, "holders", lambda self, parameter, of=holders: of.get(id(parameter), ()))
        rank.start()
        by = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (shared, norm, copied)]
        for step in range(1, 5):
            State.of(rank).module_begins(model)
            model(torch.ones(2)).sum().backward()
            by[0].step()
            by[1].step()
            if step % 2 == 0:
                State.of(rank).module_begins(copied)
                copied(torch.ones(2)).sum().backward()
                by[2].step()
        rank.close()
        assert counting.steps[id(by[0])] == counting.steps[id(by[1])]
        assert (id(by[2]) in counting.steps) != declared
        assert (counting.steps[id(by[0])] == [1, 2, 3, 4]) or not declared
