"""The protocol of a pass, `Rewrite`, and what it returns for each site, `Result`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.fx import Graph

from ...config import Config
from ...records.records import AnyRecord


@dataclass(frozen=True)
class Result:
    """The result of a pass for one site: an attention or another operation that the pass replaces or keeps.

    Attributes:
        record: the record of the site.
        asked_for: whether the site is not replaced because of the program's settings, which is no error under `strict`.
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
        """Rewrites a graph in place.  An exception leaves the graph valid.

        Returns:
            The result of each site, in the order of the forward, without sites that an earlier call returned.
        """

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns fallbacks for the sites of a graph on which no pass runs; `cause` names the settings of Inductor.

        A site that the pass would have replaced gets the reason PASSES_OFF, others their own reasons.
        """
