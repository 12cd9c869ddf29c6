"""`DeterministicCallback` with Lightning's Trainer, on the CPU."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor import config
from dash_inductor.errors import FallbackError

from ..support.trained import CUBLAS, WIDTH, Model, on_the_cpu, told  # noqa: F401  # a fixture of every test

pytest.importorskip("lightning", reason="the Trainer is Lightning's")

import lightning

from dash_inductor.integrations.lightning import DeterministicCallback, _log

ALL = [(logging.INFO, "dash_inductor: 1 of 1 attentions replaced, 1 of 1 attentions without a backward replaced")]
"""Of training, and of the validation before it."""


@pytest.fixture(autouse=True)
def all_messages(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    caplog.set_level(logging.INFO, logger=_log.name)


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Calls its model as a submodule or as its own forward, and logs in its steps."""

    def __init__(self, dtype: torch.dtype, inside: bool) -> None:
        super().__init__()
        self.model, self.inside = Model(dtype, dropout=0.5), inside

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        loss = (self.model(batch) if self.inside else self(batch)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, number: int) -> None:
        self.log("validation", self.model(batch).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    callback: Any, folder: Path, *, dtype: torch.dtype = torch.float32, inside: bool = False, steps: int = 2,
    checkpoint: str | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """The trained weight."""
    module = Module(dtype, inside)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[callback], **options,
    )  # fmt: skip
    batches = torch.randn(16, 2, 32, WIDTH, generator=torch.Generator().manual_seed(0))
    loaders = [torch.utils.data.DataLoader(batches, 2, shuffle=shuffle) for shuffle in (True, False)]
    trainer.fit(module, *loaders, ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / f"{steps}.ckpt")
    return module.model.weight.detach()


@pytest.mark.parametrize("inside", [False, True])
def test_a_training_with_accumulation(inside: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One message; the same bits again, whatever was drawn before; other bits with another seed; then no flag."""
    weights = []
    for number, seed in enumerate((3, 3, 4)):
        torch._dynamo.reset()
        caplog.clear()
        callback = DeterministicCallback(seed=seed, compile=True, strict=True)
        torch.rand(number)
        weights.append(fit(callback, tmp_path, inside=inside, accumulate_grad_batches=2))
        assert told(caplog, _log) == ALL
        assert not torch.are_deterministic_algorithms_enabled()
        assert not config.strict
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_resumption(tmp_path: Path) -> None:
    """From a checkpoint, with and without the callback: it has no state there."""
    fit(DeterministicCallback(seed=3), tmp_path)
    path = str(tmp_path / "2.ckpt")
    resumed = [fit(DeterministicCallback(seed=3), tmp_path, steps=4, checkpoint=path) for _ in range(2)]
    assert torch.equal(*resumed)
    fit(lightning.Callback(), tmp_path, steps=4, checkpoint=path)


@pytest.mark.parametrize("flag", [True, "warn"])
def test_the_flag_of_the_trainer(flag: bool | str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It stays as the Trainer has set it, also when fitting has ended; warnings alone are told."""
    fit(DeterministicCallback(), tmp_path, deterministic=flag)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled() == (flag == "warn")
    texts = [record.getMessage() for record in caplog.records if record.name == _log.name]
    assert any('deterministic="warn" of Lightning' in text for text in texts) == (flag == "warn")


def test_strict(tmp_path: Path) -> None:
    """What is kept, or no attention at all; an exception restores the settings."""
    for options, message in (
        ({"compile": True}, "not replaced, dtype"),
        ({}, r"strict=True, but no attention .*: compile the model by DeterministicCallback\(compile=True\)"),
    ):
        with pytest.raises(FallbackError, match=message):
            fit(DeterministicCallback(strict=True, **options), tmp_path, dtype=torch.float64)
        assert not torch.are_deterministic_algorithms_enabled()
        assert not config.strict


def test_a_seed_of_the_program(tmp_path: Path) -> None:
    """It is the default, and reaches workers of data loaders."""
    lightning.seed_everything(5)
    DeterministicCallback()
    drawn = torch.rand(1)
    DeterministicCallback(seed=5)
    assert torch.equal(drawn, torch.rand(1))
    assert os.environ["PL_SEED_WORKERS"] == "1"
    assert os.environ[CUBLAS] == ":4096:8"


def test_recording(tmp_path: Path) -> None:
    guard = pytest.importorskip("dash_guard")
    for name in "ab":
        fit(DeterministicCallback(record=tmp_path / name), tmp_path)
    compared = guard.compare(tmp_path / "a", tmp_path / "b")
    assert (compared.verdict, compared.steps) == ("equal", 2)
