"""What is known of the nodes around one softmax: their values, the operands, the results, and whose turn is next."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from ...graph.drafts import users
from .labels import Atoms, Dimension
from .scores import Scores
from .value import PUBLIC, RESULTS, Kind, Operand, Value

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes of query, key and value that kernels read."""


@dataclass
class Known:
    """What is known of the nodes of one attention, and the nodes whose turn it is.

    Args:
        scores: what was found of the scores.
        place: the places of all nodes in the graph.
        of_backward: the nodes that depend on gradients.

    Attributes:
        known: the values of nodes that are attention's own.
        named: query, key, value and the gradient of the output: the nodes that have them, each by its kind; one node
            may be several.
        chains: the nodes from which the products' operands are made, the operand of the product last.
        query_dim, inner_dim, value_dim: the dimensions of the queries, of query and key, and of value.
        results: the products of the output and of the gradients.
        dropout: the probability with which a probability is dropped.
        random: the nodes that draw random numbers.
    """

    scores: Scores
    place: dict[Node, int]
    of_backward: Set[Node]
    known: dict[Node, Value] = field(default_factory=dict)
    named: dict[Operand, dict[Node, Value]] = field(default_factory=dict)
    chains: dict[Operand, list[Node]] = field(default_factory=dict)
    query_dim: Dimension = ()
    inner_dim: Dimension = ()
    value_dim: Dimension = ()
    results: dict[Kind, Node] = field(default_factory=dict)
    dropout: float = 0.0
    random: list[Node] = field(default_factory=list)
    _queue: list[tuple[int, Node]] = field(default_factory=list)

    @property
    def atoms(self) -> Atoms:
        return self.scores.atoms

    @property
    def keys(self) -> Dimension:
        """The dimension of the keys, without the column of a sink."""
        return self.atoms.atoms(self.scores.key_dim)

    @property
    def rows(self) -> Dimension:
        """The dimension of the queries."""
        return self.atoms.atoms(self.query_dim)

    @property
    def dtype(self) -> torch.dtype | None:
        """The narrowest dtype of kernels in which query, key and value all are somewhere, as far as these are known;
        None if there is none.
        """
        found = [{node.meta["val"].dtype for node in self.chains[kind]} for kind in self.chains if kind != "G"]
        common = set(DTYPES).intersection(*found)
        return min(common, key=lambda dtype: (dtype.itemsize, str(dtype)), default=None)

    def strangers(self) -> Iterator[tuple[Node, Node]]:
        """The readers without a value of nodes that are attention's own, with these nodes."""
        for node, value in self.known.items():
            if value.kind not in PUBLIC:
                yield from ((node, user) for user in users(node) if user not in self.known)

    def is_kind(self, node: object, *kinds: Kind) -> bool:
        """Whether a node has a value of one of these kinds."""
        return isinstance(node, Node) and node in self.known and self.known[node].kind in kinds

    def of(self, node: Node) -> list[Value | None]:
        """The values of a node's arguments."""
        return [self.known.get(arg) if isinstance(arg, Node) else None for arg in node.args]

    def set(self, node: Node, value: Value) -> None:
        """Name a node; it is the turn of its users then."""
        self.known[node] = value
        if value.kind not in RESULTS:
            for user in node.users:
                self.push(user)

    def set_operand(self, node: Node, value: Value) -> None:
        """Name a node that has an operand, by its kind."""
        self.named.setdefault(value.kind, {})[node] = value  # type: ignore[arg-type]
        for user in node.users:
            self.push(user)

    def push(self, node: Node) -> None:
        """Let it be a node's turn, in the order of the graph."""
        if node in self.place:
            heapq.heappush(self._queue, (self.place[node], node))

    def turns(self) -> Iterator[Node]:
        """The nodes whose turn it is, until there are no more."""
        while self._queue:
            yield heapq.heappop(self._queue)[1]
