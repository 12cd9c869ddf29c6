"""`MlflowLog`: digests, records and findings in a run of MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import mlflow
from mlflow.entities import Metric

from ..errors import ArgumentError


class MlflowLog:
    """A `dash_inductor.observers.log.Log` for MLflow: numbers as metrics, tables as artifacts, alerts as tags.

        DeterministicCallback(record="runs/a", log_to=MlflowLog())

    Args:
        run_id: the run; by default the one that is active in the thread in which something is first logged, or in which
            this is made.
    """

    def __init__(self, run_id: str | None = None) -> None:
        active = mlflow.active_run()
        self._run_id: str | None = run_id or (active.info.run_id if active else None)
        self._client: mlflow.MlflowClient | None = None

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Logs numbers of a training step, in one request."""
        now = int(time.time() * 1000)
        client, run_id = self._run()
        client.log_batch(run_id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Logs the artifact ``name.json``, which MLflow shows as a table."""
        table = {"columns": list(columns), "data": [list(row) for row in rows]}
        client, run_id = self._run()
        client.log_dict(run_id, table, f"{name}.json")

    def alert(self, title: str, text: str) -> None:
        """Sets the tag ``alert.title``."""
        client, run_id = self._run()
        client.set_tag(run_id, f"alert.{title}", text)

    def _run(self) -> tuple[mlflow.MlflowClient, str]:
        if self._run_id is None:
            active = mlflow.active_run()
            if active is None:
                raise ArgumentError("run_id", None, "a run's id, or an active run (mlflow.start_run)")
            self._run_id = active.info.run_id
        self._client = self._client or mlflow.MlflowClient()
        return self._client, self._run_id
