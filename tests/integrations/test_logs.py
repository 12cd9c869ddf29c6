"""Digests, records and findings in W&B, TensorBoard and MLflow, each by its own package, without a network."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dash_inductor.errors import ArgumentError
from dash_inductor.integrations.training import DeterministicTraining
from dash_inductor.observers.log import Log, as_markdown

from ..support.trained import WIDTH, Model, on_the_cpu  # noqa: F401  # a fixture of every test

pytest.importorskip("dash_guard", reason="its fingerprints are what is logged")

import dash_guard as guard
from dash_guard.process.alerts import Alerts
from dash_guard.report.findings import Finding, FindingsFile

STEPS = 3
FOUND = Finding("slow", "suspect", "rank 1 is late", "Look at its host.", step=7)


def unset(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Variables that a package sets are removed in the end."""
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


class Heard:
    """A log that keeps everything."""

    def __init__(self, fails: bool = False) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self.tables: dict[str, list[Sequence[str]]] = {}
        self.alerts: list[tuple[str, str]] = []
        self.fails = fails

    def values(self, step: int, values: Mapping[str, float]) -> None:
        if self.fails and step == 2:
            raise ConnectionError("no network")
        self.steps[step] = dict(values)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if self.fails:
            raise ConnectionError("no network")
        self.tables[name] = [columns, *rows]

    def alert(self, title: str, text: str) -> None:
        self.alerts.append((title, text))


def train(log_to: Log, folder: Path, other: int | None = None) -> None:
    """Train; from the step `other` on with another bit."""
    torch._dynamo.reset()
    training = DeterministicTraining(logging.getLogger("tests"), "--compile", record=folder, log_to=log_to)
    training.begin()
    model = Model(torch.float32)
    call, optimizer = torch.compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        x = torch.linspace(-1, 1, 2 * 8 * WIDTH).view(1, 2, 8, WIDTH)
        call(x if other is None or step < other else x.nextafter(torch.ones(()))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    training.end()


def test_digests(tmp_path: Path) -> None:
    """Equal runs have equal digests; of others they differ from the step on; all are whole numbers below 2^48."""
    logs = [Heard(), Heard(), Heard()]
    for log, other in zip(logs, (None, None, 2), strict=True):
        train(log, tmp_path / str(id(log)), other)
    first, second, third = (log.steps for log in logs)
    assert first == second
    assert list(first) == list(range(1, STEPS + 1))
    assert {"digest/gradient", "digest/parameter", "digest/activation"} <= first[2].keys()
    assert len({step["digest/parameter"] for step in first.values()}) == STEPS
    assert first[1] == third[1]
    for name in ("digest/input", "digest/gradient", "digest/parameter"):
        assert first[2][name] != third[2][name]
    assert all(value == int(value) and 0 <= value < 1 << 48 for step in first.values() for value in step.values())
    columns, row = logs[0].tables["attention"]
    assert dict(zip(columns, row, strict=True))["status"] == "replaced"


def test_an_error_of_the_logger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is one warning for each method; training and its recording go on."""
    log = Heard(fails=True)
    train(log, tmp_path / "a")
    train(Heard(), tmp_path / "b")
    assert list(log.steps) == [1]
    (warning,) = [record.getMessage() for record in caplog.records if "digests are not logged" in record.getMessage()]
    assert "from step 2 on: ConnectionError: no network" in warning
    assert any("the records are not logged: ConnectionError" in record.getMessage() for record in caplog.records)
    assert guard.compare(tmp_path / "a", tmp_path / "b").verdict == "equal"


def test_findings_are_alerts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """New ones alone; an error is one warning."""
    file, log = FindingsFile(tmp_path), Heard()
    file.add(FOUND)
    alerts = Alerts(tmp_path, log)
    file.add(FOUND)
    alerts.close()
    assert log.alerts == [("slow: suspect", "rank 1 is late (step 7). Look at its host.")]
    alerts = Alerts(tmp_path, log)
    file.path.write_text("nothing\n" * 3)
    alerts.close()
    assert any("findings are not logged any more" in record.getMessage() for record in caplog.records)


def test_a_guard_with_a_log(tmp_path: Path) -> None:
    log = Heard()
    with guard.guard(tmp_path, live=False, log_to=log):
        FindingsFile(tmp_path).add(FOUND)
    assert len(log.alerts) == 1


def of_a_callback(folder: Path, log_to: Any) -> DeterministicTraining:
    return DeterministicTraining(logging.getLogger("tests"), "--compile", record=folder, log_to=log_to)


@pytest.mark.parametrize("log_to", ["tensorboard", Heard, object()], ids=["text", "class", "object"])
@pytest.mark.parametrize("watching", [guard.record, guard.guard, of_a_callback])
def test_what_is_no_log(watching: Callable[..., Any], log_to: Any, tmp_path: Path) -> None:
    """Refused when the callback is made, before the training."""
    with pytest.raises(ArgumentError, match=r"log_to=.* is not allowed: expected an object with "):
        watching(tmp_path, log_to=log_to)


@pytest.mark.parametrize("name", ["record", "guard"])
def test_what_is_no_folder(name: str) -> None:
    for value in (3, "", b"runs"):
        with pytest.raises(ArgumentError, match=f"^{name}={value!r} is not allowed"):
            DeterministicTraining(logging.getLogger("tests"), "--compile", **{name: value})


def test_markdown() -> None:
    assert as_markdown(["a", "b"], [["1|2", "3"]]) == "| a | b |\n| --- | --- |\n| 1\\|2 | 3 |"


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from dash_inductor.integrations.tensorboard import TensorBoardLog

    log, heard = TensorBoardLog(tmp_path / "events"), Heard()
    train(log, tmp_path / "a")
    train(heard, tmp_path / "b")
    log.alert("slow: suspect", "rank 1 is late")
    found = EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    for name in ("digest/gradient", "digest/parameter"):
        values = [(event.step, event.tensor_proto.double_val[0]) for event in found.Tensors(name)]
        assert values == [(step, values[name]) for step, values in heard.steps.items()]
    ((table,), (alert,)) = (found.Tensors(f"{name}/text_summary") for name in ("attention", "alert/slow: suspect"))
    assert b"| replaced |" in table.tensor_proto.string_val[0]
    assert alert.tensor_proto.string_val == [b"rank 1 is late"]


@pytest.fixture
def wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    unset(monkeypatch, "WANDB_SERVICE")
    with wandb.init(mode="offline", dir=tmp_path) as run:
        yield run
    wandb.teardown()


@pytest.mark.parametrize("commit", [False, True])
def test_wandb(commit: bool, wandb_run: Any, tmp_path: Path) -> None:
    """Rows of a program that gives the steps itself are not pushed aside."""
    from dash_inductor.integrations.wandb import WandbLog

    log, heard = WandbLog(commit=commit), Heard()
    train(log, tmp_path / "a")
    train(heard, tmp_path / "b")
    log.alert("slow: suspect", "rank 1 is late")
    if not commit:
        wandb_run.log({"loss": 1.0}, step=0)
    wandb_run.log({}, commit=True)
    assert commit or wandb_run.summary["loss"] == 1.0
    last = {name: wandb_run.summary[name] for name in heard.steps[STEPS]}
    assert last == heard.steps[STEPS]
    assert wandb_run.summary["digest/step"] == STEPS
    assert wandb_run.summary["attention"]["nrows"] == 1


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unset(monkeypatch, "MLFLOW_TRACKING_URI")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    from dash_inductor.integrations.mlflow import MlflowLog

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "mlflow").as_uri())
    try:
        with pytest.raises(ArgumentError, match="run_id=None is not allowed"):
            MlflowLog().alert("slow", "rank 1 is late")
        with mlflow.start_run() as run:
            log, heard = MlflowLog(), Heard()
            train(log, tmp_path / "a")
            train(heard, tmp_path / "b")
            log.alert("slow: suspect", "rank 1 is late")
        client = mlflow.MlflowClient()
        for name in ("digest/gradient", "digest/gradient of attention"):
            history = client.get_metric_history(run.info.run_id, name)
            assert {each.step: each.value for each in history} == {n: step[name] for n, step in heard.steps.items()}
        assert client.get_run(run.info.run_id).data.tags["alert.slow: suspect"] == "rank 1 is late"
        table = json.loads(Path(client.download_artifacts(run.info.run_id, "attention.json", tmp_path)).read_text())
        assert "replaced" in table["data"][0]
    finally:
        mlflow.set_tracking_uri(before)
