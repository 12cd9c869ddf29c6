"""`TensorBoardLog`: digests, records and findings in a folder of TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torch.utils.tensorboard import SummaryWriter

from ..observers.log import as_markdown


class TensorBoardLog:
    """A `dash_inductor.observers.log.Log` for TensorBoard: numbers as scalars, tables and alerts as texts.

        DeterministicCallback(record="runs/a", log_to=TensorBoardLog("runs/a"))

    Args:
        writer: a writer of the program, or a folder for one of its own.
    """

    def __init__(self, writer: SummaryWriter | str | os.PathLike[str]) -> None:
        self._writer = writer if isinstance(writer, SummaryWriter) else SummaryWriter(os.fspath(writer))

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Logs numbers of a training step, in double precision, which digests need."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, new_style=True, double_precision=True)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Logs a table in Markdown."""
        self._writer.add_text(name, as_markdown(columns, rows))
        self._writer.flush()

    def alert(self, title: str, text: str) -> None:
        """Logs a text under ``alert/``."""
        self._writer.add_text(f"alert/{title}", text)
        self._writer.flush()
