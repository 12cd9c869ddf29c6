"""State at rest in one process: flipped bits are found, and writes of the program cause no finding."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dash_guard.checks import all as all_checks
from dash_guard.detectors import all as all_detectors
from dash_guard.detectors.detector import Job
from dash_guard.monitor.monitor import Monitor
from dash_guard.process.rank import Rank
from dash_guard.report.findings import Finding
from dash_guard.transport.channel import Local

from .support.planted import flip

STEP, STEPS = 4, 8
Between = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.Linear(3, 3))


def nothing(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def found(
    between: Between,
    model: nn.Module | None = None,
    called: Callable[[nn.Module], nn.Module] = lambda model: model,
    make: Callable[[list[Tensor]], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, foreach=True),
    scaler: bool = False,
    at_rest: int = 1,
    in_step: Between = nothing,
) -> tuple[list[Finding], Monitor, Rank]:
    """Train one process under the checks of bits; its findings."""
    model = network() if model is None else model
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    local, job = Local(), Job(1)
    rank = Rank(0, 1, local.end(0))
    rank.checks = [kind(rank, at_rest=at_rest) for kind in all_checks.BITS]
    monitor = Monitor(job, local, [kind(job) for kind in all_detectors.BITS], None, lambda finding: None, lambda: 0.0)
    runs = called(model)
    scale = torch.amp.GradScaler("cpu", enabled=scaler, init_scale=4.0)
    rank.start()
    try:
        for step in range(1, STEPS + 1):
            between(step, model, optimizer)
            generator = torch.Generator().manual_seed(step)
            loss = runs(torch.randn(6, 8, generator=generator)).square().sum()
            scale.scale(loss).backward()
            in_step(step, model, optimizer)
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
            monitor.turn(float(step))
    finally:
        rank.close()
    monitor.finish(float(STEPS + 1))
    assert len(rank.checks) == len(all_checks.BITS), rank.coverage.to_dict()
    return monitor.findings, monitor, rank


def flipping(tensor: Callable[[nn.Module, torch.optim.Optimizer], Tensor], step: int = STEP) -> Between:
    def between(now: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if now == step:
            flip(tensor(model, optimizer), 3, 5)

    return between


def weight(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    return model[0].weight


def moment(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    return optimizer.state[model[2].weight]["exp_avg"]


def only(findings: list[Finding]) -> tuple[str, int | None, str]:
    (finding,) = findings
    assert (finding.kind, finding.ranks) == ("at_rest", (0,))
    return finding.severity, finding.step, finding.tensor


WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "one at a time": {"make": lambda p: torch.optim.AdamW(p, foreach=False)},
    "fused": {"make": lambda p: torch.optim.AdamW(p, fused=True)},
    "scaled": {"scaler": True},
    "compiled": {"called": lambda model: torch.compile(model, backend="aot_eager")},
}


@pytest.mark.parametrize("way", WAYS)
def test_clean_and_flipped(way: str) -> None:
    clean, monitor, _ = found(nothing, **WAYS[way])  # type: ignore[arg-type]
    assert clean == []
    assert monitor.coverage.to_dict()["at_rest"]["counts"]["comparisons"] == 2 * STEPS - 1
    findings, _, _ = found(flipping(weight), **WAYS[way])  # type: ignore[arg-type]
    assert only(findings) == ("suspect", STEP, "parameter 0.weight")


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        (moment, "optimizer state 2.weight exp_avg"),
        (lambda model, by: by.state[model[0].bias]["step"], "optimizer state 0.bias step"),
        (lambda model, by: model[1].running_mean, "buffer 1.running_mean"),
        (lambda model, by: model[3].weight, "parameter 3.weight"),
    ],
)
def test_all_kinds_of_state(tensor: Callable[[nn.Module, torch.optim.Optimizer], Tensor], name: str) -> None:
    """The last layer is frozen: no optimizer has it."""
    model = network()
    model[3].requires_grad_(False)
    findings, _, _ = found(flipping(tensor), model)
    assert only(findings) == ("suspect", STEP, name)
    assert found(flipping(tensor), copy.deepcopy(model), at_rest=0)[0] == []


def test_between_forward_and_update() -> None:
    findings, _, _ = found(nothing, in_step=flipping(weight))
    assert only(findings) == ("suspect", STEP, "parameter 0.weight")
    assert findings[0].evidence["when"] == "update"


def gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    assert model[2].weight.grad is not None
    return model[2].weight.grad


@pytest.mark.parametrize("way", [way for way in WAYS if way != "scaled"])
def test_gradients_between_backward_and_update(way: str) -> None:
    findings, monitor, _ = found(nothing, in_step=flipping(gradient), **WAYS[way])  # type: ignore[arg-type]
    assert only(findings) == ("suspect", STEP, "gradient 2.weight")
    assert "between the backward and the optimizer" in findings[0].sentence
    assert monitor.coverage.to_dict()["at_rest"]["counts"]["gradients"] == 8 * (STEPS - 1)
    assert found(nothing, in_step=flipping(gradient), at_rest=0)[0] == []


def test_gradients_that_the_program_writes_are_not_compared() -> None:
    def clip(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    findings, monitor, _ = found(nothing, in_step=clip)
    assert findings == []
    assert monitor.coverage.to_dict()["at_rest"]["unseen"] == {
        "gradients that the program wrote in between": 8 * (STEPS - 1)
    }
    findings, monitor, _ = found(nothing, in_step=flipping(gradient), scaler=True)
    assert findings == []
    assert "gradients, because a gradient scaler writes them" in monitor.coverage.to_dict()["at_rest"]["unseen"]


def test_gradients_of_several_backwards_and_of_two_optimizers() -> None:
    """The second backward adds to the gradients of the first one; a step ends after both optimizers."""
    model = network()
    by = [torch.optim.SGD(part.parameters(), 0.1) for part in (model[0], model[2])]
    local, job = Local(), Job(1)
    rank = Rank(0, 1, local.end(0))
    rank.checks = [kind(rank) for kind in all_checks.BITS]
    monitor = Monitor(job, local, [kind(job) for kind in all_detectors.BITS], None, lambda finding: None, lambda: 0.0)
    rank.start()
    try:
        for step in range(1, 9):
            for optimizer in by:
                model(torch.ones(6, 8) * step).square().sum().backward()
                if step in (3, 5) and optimizer is by[step % 3 == 2]:
                    flip(gradient(model, optimizer) if step == 5 else model[0].weight.grad, 1, 3)
                optimizer.step()
            if step == 7:
                model(torch.ones(6, 8)).sum().backward()  # one more than before
            for optimizer in by:
                optimizer.zero_grad()
            monitor.turn(float(step))
    finally:
        rank.close()
    assert [(f.step, f.tensor) for f in monitor.findings] == [(3, "gradient 0.weight"), (5, "gradient 2.weight")]


def test_steps_that_a_scaler_skips() -> None:
    def overflow(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step in (3, 5):
            model[0].weight.grad.fill_(float("inf"))

    assert found(nothing, scaler=True, in_step=overflow)[0] == []
    findings, _, _ = found(flipping(weight, 6), scaler=True, in_step=overflow)
    assert [(f.ranks, f.tensor) for f in findings] == [((0,), "parameter 0.weight")]


def test_a_share_of_the_steps() -> None:
    """Behind every second step."""
    for step in (4, 5, 6, 7):
        findings, _, _ = found(flipping(weight, step), at_rest=2)
        assert bool(findings) is (step % 2 == 1), step


def test_what_the_program_writes_is_a_note() -> None:
    def clamp(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            model[0].weight.clamp_(-0.01, 0.01)

    findings, _, _ = found(clamp)
    assert [(f.severity, f.ranks, f.cause) for f in findings] == [("note", (), "program")]

    def load(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == STEP:
            model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    findings, monitor, _ = found(load)
    assert {(f.severity, f.ranks) for f in findings} == {("note", ())}
    assert len(findings) <= 3
    assert "tensors that the program wrote in between" in monitor.coverage.to_dict()["at_rest"]["unseen"]


def test_what_the_program_writes_without_changing_versions_ends_as_a_note() -> None:
    def clamp(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model[0].weight.data.mul_(0.99)

    findings, _, _ = found(clamp)
    assert [f.severity for f in findings] == ["suspect", "suspect", "note"]


def test_what_cannot_be_hashed_is_said() -> None:
    class Quantized(torch.Tensor):
        pass

    model = network()
    model.register_buffer("scales", torch.ones(3).as_subclass(Quantized))
    _, monitor, _ = found(nothing, model)
    assert any("Quantized" in why for why in monitor.coverage.to_dict()["at_rest"]["unseen"])


def test_two_optimizers_and_a_model_that_changes() -> None:
    model = network()
    first = torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9)

    def between(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step > 1:
            first.step()
            first.zero_grad()
        if step == 6:
            flip(first.state[model[0].weight]["momentum_buffer"], 1, 2)

    def rest_of(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters[2:])

    findings, _, _ = found(between, model, make=rest_of)
    assert [f.tensor for f in findings if f.ranks] == ["optimizer state 0.weight momentum_buffer"]


def test_a_hash_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right, _, rank = found(nothing)
    assert right == []
    assert rank.coverage.to_dict()["at_rest"]["counts"]["hashes_tested"] == 1
    monkeypatch.setattr("dash_guard.checks.at_rest.KNOWN", ((1, 2),) * 5)
    (finding,) = found(nothing)[0]
    assert (finding.kind, finding.severity, finding.ranks) == ("guard", "suspect", (0,))


def test_a_model_that_is_gone_in_the_end_is_no_fault() -> None:
    local, job = Local(), Job(1)
    rank = Rank(0, 1, local.end(0))
    rank.checks = [kind(rank) for kind in all_checks.BITS]

    def train() -> None:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.ones(6, 8)).sum().backward()
            optimizer.step()

    rank.start()
    try:
        train()
        gc.collect()
    finally:
        rank.close()
    monitor = Monitor(job, local, [kind(job) for kind in all_detectors.BITS], None, lambda finding: None, lambda: 0.0)
    assert monitor.finish(0.0) == []
    assert "tensors that were freed or replaced" in monitor.coverage.to_dict()["at_rest"]["unseen"]


@pytest.mark.parametrize("write", ["nothing", "a bit", "version", "data"])
def test_a_model_that_no_optimizer_updates_is_compared_unless_the_program_writes_it(write: str) -> None:
    """A teacher, in which a bit flips; or averaged weights."""
    teacher = network().requires_grad_(False).eval()

    def between(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if write == "a bit" and step == STEP:
            flip(teacher[0].weight, 3, 5)
        elif write in ("version", "data") and step >= STEP:
            (teacher[0].weight.data if write == "data" else teacher[0].weight).mul_(0.9)

    def used(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            teacher(torch.ones(6, 8))

    findings, monitor, _ = found(between, in_step=used)
    if write == "a bit":
        severity, step, tensor = only(findings)
        assert (severity, step) == ("suspect", STEP)
        assert tensor.endswith("0.weight")
    else:
        assert findings == []
    why = "tensors of models that no optimizer updates, which the program writes itself"
    assert monitor.coverage.to_dict()["at_rest"]["unseen"].get(why, 0) == (write in ("version", "data"))
