"""A rewrite of graphs: one file that says what it does, and one line of `all.REWRITES`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.fx import Graph

from ...config import Config
from ...records.records import AnyRecord


@dataclass(frozen=True)
class Result:
    """What a rewrite did with one place of a graph.

    Attributes:
        record: the record of it.
        asked_for: whether a setting of the program keeps the place as it is, so that `strict` accepts that.
    """

    record: AnyRecord
    asked_for: bool = False


class Rewrite(Protocol):
    """A rewrite.  `runner` applies it, publishes its records, traces the graph around it, and sees to `strict`."""

    @property
    def name(self) -> str:
        """What is rewritten."""

    def is_on(self, config: Config) -> bool:
        """Whether the settings let it rewrite anything."""

    def apply(self, graph: Graph) -> Sequence[Result]:
        """Rewrite a graph in place, so that it is sound whatever raises.

        Returns:
            What became of each place, in the order of the forward; of no place that it has returned before.
        """

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """The same for a graph that stays as it is, because Inductor's settings (`cause`) let no pass run."""
