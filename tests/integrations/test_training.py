"""What all training tools share, in a plain loop: settings and what is restored, the first report, `strict`."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import re
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

import dash_inductor
from dash_inductor import config
from dash_inductor.doctor.flag import Flag
from dash_inductor.errors import FallbackError, MissingPackageError
from dash_inductor.integrations import training as shared
from dash_inductor.integrations.training import DeterministicTraining
from dash_inductor.records.records import clear_sites

from ..support.processes import run_python
from ..support.trained import CUBLAS, Model, on_the_cpu, told  # noqa: F401  # a fixture of every test

log = logging.getLogger("tests.training")
log.setLevel(logging.INFO)


def training(**options: Any) -> DeterministicTraining:
    return DeterministicTraining(log, "--compile", **options)


def train(model: nn.Module, steps: int = 2, compiled: bool = True) -> None:
    call = torch.compile(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(steps):
        call(torch.ones(1, 2, 32, 16)).sum().backward()
        optimizer.step()


def settings() -> list[object]:
    flag = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return [
        *flag,
        torch.backends.cudnn.benchmark,
        config.strict,
        warnings.showwarning,
        torch._inductor.config.deterministic,
    ]


@pytest.mark.parametrize("strict", [False, True])
def test_a_training(strict: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message, after the first step, and all settings as before; so in a second training."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    here = training(strict=strict)
    assert os.environ[CUBLAS] == ":4096:8"
    before = settings()
    for model in (Model(torch.float32), Model(torch.float32, torch.bfloat16)):
        caplog.clear()
        here.begin()
        assert settings()[:4] == [True, False, False, strict]
        train(model)
        assert settings()[:4] == [True, False, False, strict]
        here.end()
        assert settings() == before
        n = len(model.dtypes)
        assert told(caplog, log) == [(logging.INFO, f"dash_inductor: {n} of {n} attentions replaced")]
        torch._dynamo.reset()
    here.end()
    assert settings() == before
    train(Model(torch.float64))  # neither deterministic nor strict
    assert len(told(caplog, log)) == 1


def test_what_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    here = training()
    here.begin()
    with torch.no_grad():
        torch.compile(Model(torch.float32))(torch.ones(1, 2, 32, 16))
    train(Model(torch.float32, torch.float64))
    here.end()
    ((level, text),) = told(caplog, log)
    assert level == logging.WARNING
    assert text.startswith(
        "dash_inductor: 1 of 2 attentions replaced, 1 of 1 attentions without a backward replaced; kept:"
    )
    assert "float64" in text
    assert "trained.py:" in text


def test_strict_names_what_is_kept() -> None:
    here = training(strict=True)
    here.begin()
    with pytest.raises(FallbackError, match="not replaced, dtype"):
        train(Model(torch.float32, torch.float64))
    here.end()
    assert not config.strict


@pytest.mark.parametrize("off", [False, True])
def test_a_model_that_is_not_compiled(off: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Also if dash_inductor is off; what was compiled for another training is not taken for its own."""
    with dash_inductor.disabled() if off else config.patch():
        here = training()
        advice = "dash_inductor is off (inside dash_inductor.disabled())" if off else "compile the model by --compile"
        here.begin()
        train(Model(torch.float32), compiled=off)
        here.end()
        text = f"no attention was compiled in the first step: {advice}"
        assert told(caplog, log) == [(logging.WARNING, f"dash_inductor: {text}")]
        strict = training(strict=True)
        strict.begin()
        with pytest.raises(FallbackError, match=re.escape(f"strict=True, but {text}")):
            train(Model(torch.float32), compiled=off)
        assert not torch.are_deterministic_algorithms_enabled()
        assert not config.strict


def test_graphs_of_an_earlier_training(caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on with them; `strict` accepts them if nothing in them was kept."""
    model, other = Model(torch.float32), Model(torch.float32, torch.float64)
    for each, strict in ((model, True), (model, True), (other, False), (other, True)):
        caplog.clear()
        here = training(strict=strict)
        here.begin()
        if each is other and strict:
            with pytest.raises(
                FallbackError, match=r"unless it runs graphs that were compiled before: 2 of 3 .*; kept:\n"
            ):
                train(each)
        else:
            train(each)
        here.end()
    train(model)


def test_an_earlier_training_is_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    for compiled in (True, False):
        caplog.clear()
        here = training()
        here.begin()
        train(Model(torch.float32), compiled=compiled)
        here.end()
    text = "compile the model by --compile, unless it runs graphs that were compiled before: 1 of 1 attentions replaced"
    assert told(caplog, log) == [
        (logging.WARNING, f"dash_inductor: no attention was compiled in the first step: {text}")
    ]


def test_a_training_that_an_exception_has_ended() -> None:
    """It holds until the next one begins, whose end restores what was before the first."""
    before, here = settings(), training(strict=True)
    hooks = len(optimizers._global_optimizer_post_hooks)
    here.begin()
    here.begin()
    assert len(optimizers._global_optimizer_post_hooks) == hooks + 1
    here.end()
    assert settings() == before
    assert len(optimizers._global_optimizer_post_hooks) == hooks


ORDERS = sorted({order for order in itertools.permutations("aabbcc") if list(dict.fromkeys(order)) == ["a", "b", "c"]})
"""All orders in which three trainings begin and end."""


@pytest.mark.parametrize("flag", list(Flag))
@pytest.mark.parametrize("strict", ["", "a", "b", "ac", "abc"])
def test_trainings_that_overlap(flag: Flag, strict: str) -> None:
    """Settings are in force until the last has ended, and then as before the first; `strict` while one wants it."""
    flag.put()
    before, hooks = settings(), len(optimizers._global_optimizer_post_hooks)
    for order in ORDERS:
        trainings = {name: training(strict=name in strict) for name in "abc"}
        for name in order:
            here = trainings[name]
            here.end() if here.is_running else here.begin()
            running = [each for each, of in trainings.items() if of.is_running]
            assert torch.are_deterministic_algorithms_enabled() == (bool(running) or flag is not Flag.OFF)
            assert torch.is_deterministic_algorithms_warn_only_enabled() == (flag is Flag.WARN_ONLY)
            assert config.strict == any(each in strict for each in running)
            assert len(optimizers._global_optimizer_post_hooks) == hooks + len(running)
        assert settings() == before
    Flag.OFF.put()


def test_trainings_that_overlap_hear_the_same_warnings(caplog: pytest.LogCaptureFixture) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    first, second = training(), training()
    first.begin()
    second.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        train(Alerting(torch.float32), compiled=False)
    first.end()
    second.end()
    texts = [record.getMessage() for record in caplog.records if "warn_only=True;" in record.getMessage()]
    assert [text.rpartition(": ")[2] for text in texts] == ["put_", "put_"]


class Alerting(Model):
    """`put_` without accumulation has no deterministic implementation."""

    def forward(self, x: Tensor) -> Tensor:
        torch.zeros(4).put_(torch.tensor([1]), torch.ones(1))
        return super().forward(x)


def test_warn_only_stays_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    here = training()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        here.begin()
        train(Alerting(torch.float32), compiled=False)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        here.end()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    texts = [record.getMessage() for record in caplog.records]
    (text,) = [text for text in texts if "warn_only=True;" in text]
    assert text.endswith("nondeterministic; in the first step: put_")


@pytest.mark.parametrize(("value", "reserved", "late"), [
    ("", 0, False), ("", 1, True), ("", RuntimeError("a pluggable allocator"), True), (":16:8", 1, False),
    (None, 1, True),
])  # fmt: skip
def test_the_variable_of_cublas(
    value: str | None, reserved: int | Exception, late: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It is in time before there are tensors on a GPU, even if its context exists."""
    if value is not None:
        monkeypatch.setenv(CUBLAS, value)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "memory_reserved", mock.Mock(side_effect=[0, reserved]))
        here = training()
    here.begin()
    here.end()
    assert any("is set too late" in record.getMessage() for record in caplog.records) == late


def test_a_value_of_the_program_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The doctor's checks say that it is not a good one."""
    monkeypatch.setenv(CUBLAS, ":4096:2")
    here = training()
    here.begin()
    here.end()
    assert os.environ[CUBLAS] == ":4096:2"
    assert [r.levelno for r in caplog.records if f"{CUBLAS}=:4096:2 is not one" in r.getMessage()] == [logging.WARNING]


@pytest.mark.parametrize("tool", ["transformers", "lightning", "accelerate"])
def test_help_has_the_arguments_of_all_tools(tool: str) -> None:
    """From one place, and every argument of the signature."""
    code = f"""
import inspect
import dash_inductor.integrations.{tool} as module
from dash_inductor.integrations.training import DeterministicTraining

(cls,) = (value for name, value in vars(module).items() if name in ("DeterministicCallback", "DeterministicTracker"))
lines, shared = inspect.getdoc(cls).splitlines(), inspect.getdoc(DeterministicTraining).splitlines()
begin, end = (next(n for n, line in enumerate(shared) if word in line) for word in ("strict:", "Attributes:"))
assert [line for line in shared[begin:end] if line not in lines] == []
for name in inspect.signature(cls).parameters:
    assert any(line.startswith(f"    {{name}}: ") for line in lines), name
"""
    if importlib.util.find_spec(tool) is None:  # not imported: Lightning sets variables of the process
        pytest.skip(f"{tool} is not installed")
    run_python(code)


@pytest.mark.parametrize("has_group", [False, True])
def test_only_the_first_rank_logs(
    has_group: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the process group, or before there is one by the launcher's variable."""
    monkeypatch.setattr(dist, "is_initialized", lambda: has_group)
    for rank in (1, 0):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setenv("RANK", "1" if has_group else str(rank))
        training()._tell(logging.WARNING, f"rank {rank}")
    assert [record.getMessage() for record in caplog.records] == ["dash_inductor: rank 0"]


def test_recording_and_guard(tmp_path: Path) -> None:
    """Two recordings of one training are equal; the guard watches it."""
    guard = pytest.importorskip("dash_guard")
    for name in "ab":
        torch._dynamo.reset()
        clear_sites()
        here = training(record=tmp_path / name, guard=tmp_path / f"{name} guard")
        here.begin()
        train(Model(torch.float32))
        here.end()
        assert (tmp_path / f"{name} guard").exists()
    compared = guard.compare(tmp_path / "a", tmp_path / "b")
    assert compared.verdict == "equal", compared


def test_dash_guard_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared, "entry_points", lambda **_: ())
    with pytest.raises(MissingPackageError, match="record and guard need dash-guard"):
        training(guard=tmp_path)
    assert CUBLAS not in os.environ


def test_core_imports_no_tool() -> None:
    tools = ("transformers", "lightning", "accelerate", "torchtitan", "dash_guard")
    run_python(f"import sys, dash_inductor.integrations.training; assert not {set(tools)!r} & set(sys.modules)")
