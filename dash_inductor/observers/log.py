"""`Log`: the one protocol by which digests, records and findings reach the logger that a user has chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


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


def as_markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, for loggers that show texts."""
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in (columns, ["---"] * len(columns), *rows))
    return "\n".join(f"| {line} |" for line in lines)
