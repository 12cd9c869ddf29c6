"""Trains on two ranks with the callback of a tool: ``python -m tests.support.trained_on_ranks TOOL FOLDER NAME...``.

The ranks have the variables of a launcher.  For each name there is a training, with its recording in FOLDER/NAME and
its guard in FOLDER/guard NAME; each rank writes what it has seen to FOLDER/NAME0.json or NAME1.json.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from dash_inductor import config

from ..models.programs import traced
from .forked import ranks
from .trained import WIDTH, Model

WORLD, STEPS = 2, 3


def rows() -> Tensor:
    return torch.randn(4 * WORLD * STEPS, 2, 32, WIDTH, generator=torch.Generator().manual_seed(0))


def with_transformers(folder: Path, **options: Any) -> nn.Module:
    import transformers

    from dash_inductor.integrations.transformers import DeterministicCallback

    from .hf_models import build, token_ids

    callback = DeterministicCallback(**options)
    arguments = transformers.TrainingArguments(
        str(folder / "checkpoints"), use_cpu=True, ddp_backend="gloo", max_steps=STEPS, per_device_train_batch_size=2,
        report_to=[], disable_tqdm=True, save_strategy="no", torch_compile=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = build("Llama", head_dim=16)
    model.config.attention_dropout = 0.5
    data = [{"input_ids": row, "labels": row} for row in token_ids(2 * WORLD * STEPS, 24).tolist()]
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    return model


def with_lightning(folder: Path, **options: Any) -> nn.Module:
    import lightning

    from dash_inductor.integrations.lightning import DeterministicCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(torch.float32, dropout=0.5)

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            loss: Tensor = self.model(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = DeterministicCallback(seed=0, compile=True, **options)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=WORLD, strategy="ddp", max_steps=STEPS, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder, callbacks=[callback],
    )  # fmt: skip
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(rows(), 2, shuffle=True))
    return module.model


def with_accelerate(folder: Path, **options: Any) -> nn.Module:
    import accelerate

    from dash_inductor.integrations.accelerate import DeterministicTracker

    tracker = DeterministicTracker(seed=0, **options)
    accelerator = accelerate.Accelerator(cpu=True, dynamo_backend="inductor", log_with=[tracker])
    accelerator.init_trackers("run")
    model = Model(torch.float32, dropout=0.5)
    loader = torch.utils.data.DataLoader(rows(), 2, shuffle=True)
    wrapped, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for _, batch in zip(range(STEPS), loader, strict=False):
        accelerator.backward(wrapped(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return model


TOOLS: dict[str, Callable[..., nn.Module]] = {
    "transformers": with_transformers,
    "lightning": with_lightning,
    "accelerate": with_accelerate,
}


class Heard(logging.Handler):
    """Keeps the messages of dash_inductor and dash_guard."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "dash_inductor: " in text or record.name == "dash_guard":
            self.messages.append(text)


@contextmanager
def hearing(tool: str) -> Iterator[list[str]]:
    heard, names = Heard(), ("dash_guard", *(("lightning.pytorch",) if tool == "lightning" else (tool,)))
    for name in names:
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(heard)
    yield heard.messages
    for name in names:
        logging.getLogger(name).removeHandler(heard)


@contextmanager
def no_code() -> Iterator[None]:
    """Inductor's passes run, and then their graphs, for which no code is generated."""
    compiler = torch._TorchCompileInductorWrapper
    with mock.patch.object(compiler, "__call__", lambda self, graph, inputs: traced(graph, inputs)):
        yield


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def work(tool: str, folder: Path, name: str, rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    flags: list[bool] = []

    def look(*_: Any) -> None:
        flags.append(torch.are_deterministic_algorithms_enabled())

    with hearing(tool) as messages, config.patch(cpu="reference"), no_code():
        hook = register_optimizer_step_post_hook(look)
        model = TOOLS[tool](folder, strict=True, record=folder / name, guard=folder / f"guard {name}")
        hook.remove()
        look()
    whole = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    weights = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    seen = {"weights": weights, "messages": messages, "flags": flags}
    (folder / f"{name}{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()  # which a fork does not run


if __name__ == "__main__":
    _, tool, path, *names = sys.argv
    importlib.import_module(f"dash_inductor.integrations.{tool}")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(WORLD)}
    for name in names:
        os.environ["MASTER_PORT"] = str(free_port())
        if status := ranks(WORLD, lambda rank, name=name: work(tool, Path(path), name, rank)):
            sys.exit(status)
