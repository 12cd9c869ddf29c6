"""Factors of scores that no kernel knows, such as a learned scale of each head.

A score is ``f * (q . k)``.  Where f is a number of a query or of a key alone, this package multiplies query or key by f
and calls the attention on the product.  With q' = f * q, the gradient of q is f times that of q', and the gradient of f
is the sum of the products of q with the gradient of q'.  No division by f occurs, so that f may be zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch.fx import Node

from ..graph.emit import Emitter
from ..graph.nodes import Argument

Side = Literal["query", "key"]
"""The tensor that is multiplied by a factor of the scores."""


@dataclass(frozen=True)
class Factors:
    """The tensors by which query and key are multiplied; None for none.

    Each is of floats, [batch or 1, heads or 1, length or 1, 1]; the heads and the length are those of the query or of
    the key.
    """

    query: Argument | None = None
    key: Argument | None = None

    @property
    def text(self) -> str:
        """What is multiplied, for the record; "" without factors."""
        named = [side for side, factor in (("query", self.query), ("key", self.key)) if factor is not None]
        verb = "is" if len(named) == 1 else "are"
        return f"{' and '.join(named)} {verb} multiplied by the factor of the scores" if named else ""


NO_FACTORS = Factors()


class FactorGradient(Protocol):
    """The gradient of a tensor from which a factor is computed."""

    @property
    def side(self) -> Side:
        """The tensor that the factor multiplies."""

    def put(self, emitter: Emitter, rows: Node, before: Node) -> tuple[Node, Node]:
        """Return (the node of the gradient in the graph, its replacement).

        Args:
            emitter: adds nodes.
            rows: the gradient of the factor, one number for each token of the query or the key: float32 [batch, heads,
                length, 1].
            before: the node before which nodes are added.
        """
