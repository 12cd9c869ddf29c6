"""Updates that are run again: with PyTorch's optimizers they repeat, and what one has written wrongly is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_guard.checks import recomputed_update
from dash_guard.checks.recomputed_update import RecomputedUpdate
from dash_guard.detectors.detector import Job
from dash_guard.detectors.same_rank_recompute import SameRankRecomputeDetector
from dash_guard.monitor.monitor import Monitor
from dash_guard.process.rank import Rank
from dash_guard.transport.channel import Local

from .support.planted import flip

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01),
    "groups": lambda p: torch.optim.NAdam([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}]),
}


def run(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], wrong: Callable[[int, Any], None], share: int = 100
) -> tuple[list[tuple[int | None, str]], dict[str, Any], list[Tensor]]:
    local = Local()
    rank = Rank(0, 1, local.end(0))
    rank.checks = [RecomputedUpdate(rank, same_rank_recompute=share)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    optimizer = make(list(model.parameters()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = 0
    optimizer.register_step_post_hook(lambda *_: wrong(step, optimizer))
    rank.start()
    try:
        for step in range(1, 6):
            model(torch.ones(2, 5) * step).square().sum().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    finally:
        rank.close()
    job = Job(1)
    monitor = Monitor(job, local, [SameRankRecomputeDetector(job)], None, lambda finding: None, lambda: 0.0)
    found = [(finding.step, f"{finding.stage} {finding.tensor}") for finding in monitor.turn(0.0)]
    return found, rank.coverage.to_dict().get("same_rank_recompute", {}), list(model.parameters())


def nothing(step: int, optimizer: torch.optim.Optimizer) -> None:
    pass


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_repeat_and_change_nothing(name: str) -> None:
    found, coverage, parameters = run(OPTIMIZERS[name], nothing)
    assert found == []
    assert coverage == {"counts": {"updates": 4 * 5}, "unseen": {}}
    _, off, alone = run(OPTIMIZERS[name], nothing, share=0)
    assert off == {}
    assert all(map(torch.equal, parameters, alone))


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("share", [0, 100])
def test_what_an_optimizer_writes_wrongly_is_found(state: bool, share: int) -> None:
    def wrong(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step == 3:
            parameter = optimizer.param_groups[0]["params"][2]
            flip(optimizer.state[parameter]["exp_avg"] if state else parameter, 4, 0)

    found, _, _ = run(OPTIMIZERS["adamw"], wrong, share)
    assert found == ([(3, "optimizer state 1.weight exp_avg" if state else "parameter 1.weight")] if share else [])


def test_what_does_not_fit_is_taken_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputed_update, "BYTES", 1200)
    found, coverage, _ = run(OPTIMIZERS["sgd"], nothing)
    assert found == []
    assert 5 <= coverage["counts"]["updates"] < 20
    assert list(coverage["unseen"]) == ["updates beyond 0 MiB of a step"]


def test_optimizers_of_a_program_and_those_that_do_not_repeat_are_left_alone() -> None:
    class Own(torch.optim.SGD):
        pass

    found, coverage, _ = run(lambda p: Own(p, 0.1), nothing)
    assert (found, coverage["counts"]) == ([], {})
    assert "updates of Own are not run again" in next(iter(coverage["unseen"]))

    def always(step: int, optimizer: torch.optim.Optimizer) -> None:
        flip(optimizer.param_groups[0]["params"][0], 1, 0)

    found, coverage, _ = run(OPTIMIZERS["sgd"], always)
    assert found == []
    assert list(coverage["unseen"]) == ["updates of SGD do not repeat their bits"]
