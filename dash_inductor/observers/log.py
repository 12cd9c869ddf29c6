"""`Log`: the one protocol by which digests, records and findings reach the logger that a user has chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from ..errors import ArgumentError


@runtime_checkable
class Log(Protocol):
    """A logger of a training run; `dash_inductor.integrations` has one for W&B, TensorBoard and MLflow each.

    Methods may be called on any thread.
    """

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Logs numbers of a training step, by name."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Logs a table of texts."""

    def alert(self, title: str, text: str) -> None:
        """Reports something that a person should look at."""


def check(log: object) -> None:
    """Checks the argument `log_to`.

    Raises:
        ArgumentError: it is neither None nor an object with the methods of `Log`; a class is none.
    """
    if log is not None and (isinstance(log, type) or not isinstance(log, Log)):
        raise ArgumentError("log_to", log, "an object with the methods of dash_inductor.observers.log.Log, or None")


def as_markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, for loggers that show texts."""
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in (columns, ["---"] * len(columns), *rows))
    return "\n".join(f"| {line} |" for line in lines)
