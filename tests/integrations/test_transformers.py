"""`DeterministicCallback` with the Trainer of transformers and TRL's, on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dash_inductor import config
from dash_inductor.errors import FallbackError

from ..support.trained import on_the_cpu, told  # noqa: F401  # a fixture of every test

pytest.importorskip("transformers", reason="the Trainer is transformers'")

import transformers

from dash_inductor.integrations.transformers import DeterministicCallback, _log

from ..models.programs import traced
from ..support.hf_models import build, token_ids


@pytest.fixture
def no_code() -> Iterator[None]:
    """Inductor's passes run, and then their graphs, for which no code is generated."""
    compiler = torch._TorchCompileInductorWrapper
    with mock.patch.object(compiler, "__call__", lambda self, graph, inputs: traced(graph, inputs)):
        yield


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What `full_determinism` sets is as before; all messages are caught."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.INFO, logger=_log.name)
    yield
    torch.backends.cudnn.deterministic = False


def data(rows: int = 16) -> list[dict[str, Any]]:
    return [{"input_ids": row, "labels": row} for row in token_ids(rows, 24).tolist()]


def trainer(folder: Path, callback: Any, model: Any = None, **options: Any) -> Any:
    if model is None:
        torch.manual_seed(0)
        model = build("Llama", head_dim=16)
        model.config.attention_dropout = 0.5
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, max_steps=4, per_device_train_batch_size=2, report_to=[], disable_tqdm=True,
        save_steps=2, **{"torch_compile": True} | options,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=data(), callbacks=[callback])


def weights(trained: Any) -> list[Tensor]:
    return [p.detach().clone() for p in trained.model.parameters()]


def test_a_training_with_accumulation_evaluation_and_resumption(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One message; the same bits again and from a checkpoint, whatever was drawn before `train`; then no flag."""
    options = {"gradient_accumulation_steps": 2, "save_only_model": False}
    first = trainer(tmp_path, DeterministicCallback(strict=True), **options)
    torch.rand(7)
    first.train()
    assert told(caplog, _log) == [(logging.INFO, "dash_inductor: 2 of 2 attentions replaced")]
    assert not torch.are_deterministic_algorithms_enabled()
    assert not config.strict
    second = trainer(tmp_path / "other", DeterministicCallback(), **options)
    second.train()
    third = trainer(tmp_path, DeterministicCallback(), **options)
    third.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert third.state.global_step == 4
    for other in (second, third):
        assert all(map(torch.equal, weights(first), weights(other)))
    fourth = trainer(tmp_path / "seed", DeterministicCallback(), **options, seed=7)
    fourth.train()
    assert not all(map(torch.equal, weights(first), weights(fourth)))


def test_a_model_that_is_not_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path, DeterministicCallback(), torch_compile=False).train()
    text = "no attention was compiled in the first step: compile the model by TrainingArguments(torch_compile=True)"
    assert told(caplog, _log) == [(logging.WARNING, f"dash_inductor: {text}")]
    callback = DeterministicCallback(strict=True)
    with pytest.raises(FallbackError, match="strict=True, but no attention was compiled in the first step"):
        trainer(tmp_path, callback, torch_compile=False).train()


def test_strict_and_what_is_kept(tmp_path: Path) -> None:
    """An exception of the compiler leaves the settings, until `end`."""
    callback = DeterministicCallback(strict=True)
    with pytest.raises(FallbackError, match="not replaced, dtype"):
        trainer(tmp_path, callback, build("Llama", head_dim=16).double()).train()
    assert torch.are_deterministic_algorithms_enabled()
    callback.end()
    assert not torch.are_deterministic_algorithms_enabled()
    assert not config.strict


@pytest.mark.usefixtures("no_code")
def test_full_determinism_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its flag stays when training has ended."""
    trainer(tmp_path, DeterministicCallback(), full_determinism=True).train()
    (told_of,) = [record for record in caplog.records if "full_determinism=True does not reach" in record.getMessage()]
    assert told_of.levelno == logging.WARNING
    assert "CUDA_LAUNCH_BLOCKING=1" in told_of.getMessage()
    assert torch.are_deterministic_algorithms_enabled()


def test_the_variable_is_set_too_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "memory_reserved", lambda device: 1 << 21)
        callback = DeterministicCallback()
    trainer(tmp_path, callback, torch_compile=False).train()
    assert sum("is set too late" in record.getMessage() for record in caplog.records) == 1


def test_recording(tmp_path: Path) -> None:
    guard = pytest.importorskip("dash_guard")
    for name in "ab":
        trainer(tmp_path, DeterministicCallback(record=tmp_path / name), torch_compile=False).train()
    compared = guard.compare(tmp_path / "a", tmp_path / "b")
    assert (compared.verdict, compared.steps) == ("equal", 4)


@pytest.mark.usefixtures("no_code")
def test_trl(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A trainer of TRL, which makes its model's inputs itself."""
    trl = pytest.importorskip("trl")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({str(n): n for n in range(61)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2")
    arguments = trl.SFTConfig(
        str(tmp_path), use_cpu=True, bf16=False, max_steps=2, per_device_train_batch_size=2, report_to=[],
        torch_compile=True, save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    dataset = pytest.importorskip("datasets").Dataset.from_list([{"input_ids": row["input_ids"]} for row in data()])
    trl.SFTTrainer(
        build("Llama", head_dim=16), arguments, train_dataset=dataset, processing_class=tokenizer,
        callbacks=[DeterministicCallback(strict=True)],
    ).train()  # fmt: skip
    ((level, text),) = told(caplog, _log)
    assert (level, text) == (logging.INFO, "dash_inductor: 2 of 2 attentions replaced")
