"""The protocol of a pass, `Rewrite`, and what it returns for each place of a graph, `Result`."""

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
        record: the record of the place.
        asked_for: whether the place is kept because the program's settings say so, which is no error under `strict`.
    """

    record: AnyRecord
    asked_for: bool = False


class Rewrite(Protocol):
    """A pass over a graph.  `runner` applies it, publishes its records, logs the graph and raises for `strict`."""

    @property
    def name(self) -> str:
        """The name of the pass in `config.rewrites` and in its records."""

    def is_on(self, config: Config) -> bool:
        """Returns whether the settings switch the pass on."""

    def apply(self, graph: Graph) -> Sequence[Result]:
        """Rewrite a graph in place.  An exception leaves the graph valid.

        Returns:
            The result of each place, in the order of the forward.  A place that an earlier call returned is left out.
        """

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns the results of a graph that no pass rewrites, because of Inductor's settings, which `cause` names."""
