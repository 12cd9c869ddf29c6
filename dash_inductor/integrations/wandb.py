"""`WandbLog`: digests, records and findings in a run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from ..errors import ArgumentError


class WandbLog:
    """A `dash_inductor.observers.log.Log` for Weights & Biases.

        DeterministicCallback(record="runs/a", log_to=WandbLog())

    Args:
        run: the run; by default the one that is active when something is first logged.
        commit: whether the numbers of each step are a row of their own, with the step as ``digest/step``.  By default
            they join the row that the program logs next, because W&B drops rows of a program that gives steps itself if
            others have counted further.
    """

    def __init__(self, run: Any = None, commit: bool = False) -> None:
        self._run, self._commit = run, commit

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Logs numbers of a training step."""
        self._active().log({**values, "digest/step": step}, commit=self._commit)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Logs a `wandb.Table`."""
        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._active().log({name: table}, commit=self._commit)

    def alert(self, title: str, text: str) -> None:
        """Sends an alert of level WARN, which W&B passes on by mail or to Slack."""
        self._active().alert(title=title, text=text, level="WARN")

    def _active(self) -> Any:
        if self._run is None:
            if wandb.run is None:
                raise ArgumentError("run", None, "a run, or an active one (wandb.init)")
            self._run = wandb.run
            self._run.define_metric("digest/*", step_metric="digest/step")
        return self._run
