"""Steps are counted by optimizer, however many of them take turns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dash_guard.checks.check import Check
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
