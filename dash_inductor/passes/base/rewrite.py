"""`Rewrite`, the protocol of a pass over a graph, and `Result`, what a pass returns for each site that it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.fx import Graph

from ...config import Config
from ...records.records import AnyRecord


@dataclass(frozen=True)
class Result:
    """The result of a pass for one site: an attention or another operation that the pass may replace.

    Attributes:
        record: the record of the site.
        asked_for: whether the program's own settings exclude the site, so that this is no error under `config.strict`.
    """

    record: AnyRecord
    asked_for: bool = False


class Rewrite(Protocol):
    """The protocol of a pass over a graph.

    `runner` calls it, publishes its records, logs the graph and raises an error if `config.strict` is set.
    """

    @property
    def name(self) -> str:
        """The name of the pass in `config.rewrites` and in its records."""

    def is_on(self, config: Config) -> bool:
        """Returns whether the settings switch the pass on."""

    def apply(self, graph: Graph) -> Sequence[Result]:
        """Rewrites a graph in place.  If it raises an exception, the graph is still valid.

        Returns:
            The results of the sites, in the order of the forward; sites that an earlier call returned are left out.
        """

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        """Returns fallback results for the sites of a graph on which no pass runs; the graph is not rewritten.

        A site that the pass would have replaced gets the reason PASSES_OFF, others their own reasons.  A pass
        may return an empty list if, without it, PyTorch's own operators give right results or raise an error.

        Args:
            graph: the graph.
            cause: the settings of Inductor because of which no pass runs, for the records.
        """
