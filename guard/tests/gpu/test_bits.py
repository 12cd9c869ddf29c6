"""The guard's checks of bits on a GPU: a bit that flips at rest is found, nothing waits, and no bit changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dash_guard.checks import all as all_checks
from dash_guard.checks.hyperparameters import Hyperparameters
from dash_guard.checks.recomputed_update import RecomputedUpdate
from dash_guard.checks.state import Hashed, State
from dash_guard.detectors import all as all_detectors
from dash_guard.detectors.detector import Job
from dash_guard.detectors.same_rank_recompute import SameRankRecomputeDetector
from dash_guard.fingerprints.fingerprint import add_lanes
from dash_guard.monitor.monitor import Monitor
from dash_guard.process.rank import Rank
from dash_guard.report.findings import Finding
from dash_guard.transport.channel import Local

pytestmark = pytest.mark.gpu

STEP = 5
Training = tuple[nn.Module, torch.optim.Optimizer]


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.BatchNorm1d(256), nn.Linear(256, 32)).to("cuda", torch.bfloat16)


Between = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def nothing(step: int, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def train(steps: int, between: Between, in_step: Between = nothing) -> list[Tensor]:
    """Train, calling a function before each step, and one between its backward and its update."""
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    inputs = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    targets = torch.arange(64, device="cuda") % 32
    for step in range(1, steps + 1):
        between(step, network, optimizer)
        F.cross_entropy(network(inputs).float(), targets).backward()
        in_step(step, network, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.detach().clone() for tensor in network.state_dict().values()]


def flip(tensor: Tensor) -> None:
    """Flip a bit of one element, on the device, without PyTorch's knowledge of it."""
    raw = tensor.detach().data.view(-1)
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[raw.element_size()]
    raw.view(width)[raw.numel() // 2].bitwise_xor_(1)


@pytest.fixture
def waits_are_errors() -> Iterator[Callable[[], None]]:
    """Makes every wait of the host for the device an error, from its call to the end of the test."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


TENSORS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Tensor]] = {
    "parameter 1.0.weight": lambda network, by: network[1][0].weight,
    "parameter 5.bias": lambda network, by: network[5].bias,
    "optimizer state 2.0.weight exp_avg_sq": lambda network, by: by.state[network[2][0].weight]["exp_avg_sq"],
    "optimizer state 5.bias step": lambda network, by: by.state[network[5].bias]["step"],
    "buffer 4.running_var": lambda network, by: network[4].running_var,
}


@pytest.mark.parametrize("name", [*TENSORS, ""])
def test_a_bit_that_flips_at_rest_is_found(name: str, waits_are_errors: Callable[[], None]) -> None:
    local, job = Local(), Job(1)
    rank = Rank(0, 1, local.end(0))
    rank.checks = [kind(rank) for kind in all_checks.BITS]
    monitor = Monitor(job, local, [kind(job) for kind in all_detectors.BITS], None, lambda finding: None, lambda: 0.0)

    def between(step: int, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == 4:  # kernels are loaded, and memory is pinned
            waits_are_errors()
        if step == STEP and name:
            flip(TENSORS[name](network, optimizer))

    rank.start()
    try:
        trained = train(8, between)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        rank.close()
    found = [*monitor.turn(0.0), *monitor.finish(1.0)]
    assert [check.name for check in rank.checks] == [
        "at_rest",
        "gathered_parameters",
        "collective_checksums",
        "bits",
    ]  # none was switched off
    assert [(f.kind, f.severity, f.ranks, f.step, f.tensor) for f in found] == (
        [("at_rest", "suspect", (0,), STEP, name)] if name else []
    )
    assert monitor.coverage.to_dict()["at_rest"]["counts"]["comparisons"] >= 14
    if not name:
        assert all(map(torch.equal, trained, train(8, lambda *_: None)))


@pytest.mark.parametrize("clipped", [False, True])
def test_a_gradient_that_flips_before_the_update_is_found(clipped: bool, waits_are_errors: Callable[[], None]) -> None:
    """Hashed when the backward ends, on the streams that have called it; without a wait, and not if it is clipped."""
    local, job = Local(), Job(1)
    rank = Rank(0, 1, local.end(0))
    rank.checks = [kind(rank) for kind in all_checks.BITS]
    monitor = Monitor(job, local, [kind(job) for kind in all_detectors.BITS], None, lambda finding: None, lambda: 0.0)

    def in_step(step: int, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if clipped:
            torch.nn.utils.clip_grad_value_(network.parameters(), 1e-4)
        elif step == STEP:
            assert network[2][0].weight.grad is not None
            flip(network[2][0].weight.grad)

    rank.start()
    try:
        trained = train(8, lambda step, *_: waits_are_errors() if step == 4 else None, in_step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        rank.close()
    found = [*monitor.turn(0.0), *monitor.finish(1.0)]
    assert [(f.kind, f.step, f.tensor) for f in found] == (
        [] if clipped else [("at_rest", STEP, "gradient 2.0.weight")]
    )
    if clipped:
        assert all(map(torch.equal, trained, train(8, nothing, in_step)))


@pytest.mark.parametrize("share", [0, 100])
def test_an_update_that_is_wrong_is_found_by_another_one(share: int) -> None:
    """Fused AdamW updates copies to the same bits."""
    local, job = Local(), Job(1)
    rank = Rank(0, 1, local.end(0))
    rank.checks = [RecomputedUpdate(rank, same_rank_recompute=share)]
    monitor = Monitor(job, local, [SameRankRecomputeDetector(job)], None, lambda finding: None, lambda: 0.0)

    def between(step: int, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == STEP:
            handles.append(optimizer.register_step_post_hook(lambda *_: flip(network[1][0].weight)))
        elif handles:
            handles.pop().remove()

    handles: list[Any] = []
    rank.start()
    try:
        train(8, between)
    finally:
        rank.close()
    found = [(f.kind, f.step, f"{f.stage} {f.tensor}") for f in monitor.turn(0.0)]
    assert found == ([("same_rank_recompute", STEP, "parameter 1.0.weight")] if share else [])
    assert (share == 0) == ("same_rank_recompute" not in rank.coverage.to_dict())


def test_a_fault_is_not_seen_with_the_check_off() -> None:
    local, found = Local(), list[Finding]()
    rank = Rank(0, 1, local.end(0))
    rank.checks = [kind(rank, at_rest=0) for kind in all_checks.BITS]
    rank.start()
    try:
        train(6, lambda step, network, _: flip(network[1][0].weight) if step == STEP else None)
    finally:
        rank.close()
    job = Job(1)
    monitor = Monitor(job, local, [kind(job) for kind in all_detectors.BITS], None, found.append, lambda: 0.0)
    monitor.finish(0.0)
    assert found == []


def test_the_host_runs_ahead() -> None:
    """It is through with its steps while the device still waits."""
    rank = Rank(0, 1, Local().end(0))
    rank.checks = [kind(rank) for kind in all_checks.BITS]
    slept = torch.cuda.Event()

    def between(step: int, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == 4:
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000_000)
            slept.record()
        if step == 7:
            assert not slept.query()

    rank.start()
    try:
        train(7, between)
    finally:
        rank.close()


def test_parts_and_tensors_of_equal_size_have_the_lanes_of_the_cpu() -> None:
    raw = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    cuts = [0, 8, 4096, 200_000, 200_008, 600_000, 1 << 20]
    parts = [raw[a:b] for a, b in itertools.pairwise(cuts)]
    firsts = [cut // 8 for cut in cuts[:-1]]
    equal = [raw[n * 8 : n * 8 + 300_000] for n in range(7)]
    tensors, rows = [raw, *parts, *equal], [0, *[1] * len(parts), *range(2, 9)]
    words = [0, *firsts, *[0] * 7]
    here, there = (torch.zeros(9, 2, dtype=torch.int64, device=device) for device in ("cpu", "cuda"))
    add_lanes(tensors, here, rows, words)
    device = raw.cuda()
    add_lanes([device[t.storage_offset() : t.storage_offset() + t.numel()] for t in tensors], there, rows, words)
    assert torch.equal(here, there.cpu())
    assert torch.equal(here[0], here[1])


def test_settings_on_a_gpu_are_hashed_without_a_wait(waits_are_errors: Callable[[], None]) -> None:
    """A learning rate that lies on the device, as a program with CUDA graphs has it."""
    rank = Rank(0, 1, Local().end(0))
    hyperparameters = Hyperparameters(State.of(rank))
    rate = torch.tensor(0.1, device="cuda")
    optimizer = torch.optim.AdamW(model().parameters(), lr=rate, capturable=True, foreach=True)
    kept: list[list[Hashed]] = [hyperparameters.of("bits", optimizer)]  # kernels are loaded
    waits_are_errors()
    for step in range(3):
        if step == 2:
            rate.mul_(2.0)
        kept.append(hyperparameters.of("bits", optimizer))
    torch.cuda.set_sync_debug_mode("default")
    found = [
        {e.name: row for part in parts for e, row in zip(part.entries, part.lanes.tolist(), strict=True)}
        for parts in kept
    ]
    assert found[0] == found[1] == found[2]
    assert {name for name in found[0] if found[3][name] != found[2][name]} == {"AdamW.0 lr"}
    assert found[0]["AdamW.0 betas"]
    assert {part.lanes.device.type for part in kept[0]} == {"cpu", "cuda"}
