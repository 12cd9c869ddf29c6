"""Optimizer settings, as they are hashed: names, values, and the ranks that must have them alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dash_guard.checks.hyperparameters import GROUPS, Hyperparameters
from dash_guard.checks.state import State
from dash_guard.process.rank import Rank
from dash_guard.shared.roots import SETTING
from dash_guard.transport.channel import Local


@pytest.fixture
def rank() -> Rank:
    return Rank(0, 4, Local().end(0))


def hashed(hyperparameters: Hyperparameters, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Lanes by name."""
    parts = hyperparameters.of("bits", optimizer)
    rows = [(entry, row) for part in parts for entry, row in zip(part.entries, part.lanes.tolist(), strict=True)]
    assert {entry.stage for entry, _ in rows} == {SETTING}
    return {entry.name: tuple(row) for entry, row in rows}


def sgd(*groups: dict[str, Any], **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.ones(2, requires_grad=True)], **group} for group in groups], **settings)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"lr": 0.1 + 5e-18}, ""), ({"lr": 0.1 + 2e-17}, "lr"), ({"momentum": 0}, ""), ({"nesterov": True}, "nesterov"),
        ({"foreach": False}, "foreach"), ({"own": (1, 2.0)}, ""), ({"own": [1, 2]}, ""), ({"own": (1, 3)}, "own"),
        ({"own": "warm"}, "own"), ({"lr": torch.tensor(0.1)}, "lr"),
    ],
)  # fmt: skip
def test_a_setting_is_seen_if_it_has_another_value(rank: Rank, changed: dict[str, Any], name: str) -> None:
    optimizer = sgd({"own": (1, 2.0)}, lr=0.1, momentum=0.0)
    hyperparameters = Hyperparameters(State.of(rank))
    before = hashed(hyperparameters, optimizer)
    assert {"SGD.0 lr", "SGD.0 momentum", "SGD.0 own"} < set(before)
    optimizer.param_groups[0].update(changed)
    after = hashed(hyperparameters, optimizer)
    assert {key for key in before if after[key] != before[key]} == ({f"SGD.0 {name}"} if name else set())
    assert rank.coverage.to_dict() == {}


def test_a_learning_rate_in_a_tensor(rank: Rank) -> None:
    rate = torch.tensor(0.1)
    optimizer, hyperparameters = sgd({}, lr=rate), Hyperparameters(State.of(rank))
    before = hashed(hyperparameters, optimizer)
    assert hashed(hyperparameters, optimizer) == before
    rate.fill_(0.2)
    assert {key for key, value in hashed(hyperparameters, optimizer).items() if value != before[key]} == {"SGD.0 lr"}


def test_names_of_groups_and_of_optimizers(rank: Rank) -> None:
    hyperparameters = Hyperparameters(State.of(rank))
    first, second = sgd({}, {"lr": 0.5}, lr=0.1), sgd({}, lr=0.1)
    one, two = hashed(hyperparameters, first), hashed(hyperparameters, second)
    assert {"SGD.0 lr", "SGD.1 lr"} < set(one)
    assert "SGD(2).0 lr" in two
    assert one["SGD.0 lr"] == two["SGD(2).0 lr"] != one["SGD.1 lr"]
    assert hashed(hyperparameters, first) == one


def test_what_has_no_value_is_counted(rank: Rank) -> None:
    hyperparameters = Hyperparameters(State.of(rank))
    assert "SGD.0 f" not in hashed(hyperparameters, sgd({"f": lambda: 1}, lr=0.1))
    assert len({name.split()[0] for name in hashed(hyperparameters, sgd(*[{}] * (GROUPS + 1), lr=0.1))}) == GROUPS
    unseen = rank.coverage.to_dict()["bits"]["unseen"]
    assert unseen == {
        "optimizer settings that are no numbers, texts or tensors": 1,
        f"settings of groups of parameters beyond {GROUPS}": 1,
    }


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_all_ranks_of_a_mesh_share_settings_and_counters(rank: Rank, shape: tuple[int, ...]) -> None:
    model = torch.nn.Linear(8, 8)
    plain = torch.ones(2, requires_grad=True)
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
    optimizer = torch.optim.Adam([{"params": [plain]}, {"params": [*model.parameters()]}], lr=0.1)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = State.of(rank)
    state.after(optimizer)
    everyone, pair = tuple(range(4)), (1, 3) if len(shape) > 1 else (1,)
    assert state.holders(optimizer) == [(), everyone]
    assert state.holders(optimizer) is state.holders(optimizer)
    ranks = {entry.name.rpartition(" ")[2]: entry.ranks for entry in state.optimizer_entries(optimizer)[4:]}
    assert (ranks["step"], ranks["exp_avg"]) == (everyone, pair)
