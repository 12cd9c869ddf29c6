"""What is known of the nodes around one softmax: the tensors of attention that they hold, and which to visit next."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from ...graph.nodes import op_name
from ...graph.temporaries import users
from ...masks.nodes import CREATION
from .labels import Atoms, Dimension
from .scores import Scores
from .value import PUBLIC, RESULTS, Kind, Operand, Value

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes of query, key and value that the kernels accept."""


@dataclass
class Known:
    """What is known of the nodes of one attention, and the queue of nodes to visit.

    Args:
        scores: the scores of the attention.
        place: the index of every node in the graph.
        of_backward: the nodes that depend on gradients.

    Attributes:
        known: which tensor of attention each node holds, for the nodes that belong to attention.
        named: the nodes that hold query, key, value and the gradient of the output, by kind; one node may hold several.
        chains: for each operand of a product, the nodes from which it is computed, the operand itself last.
        query_dim, inner_dim, value_dim: the dimensions of the queries, of the head dim of query and key, and of that of
            value, each as the atoms (index ranges) that it merges.
        results: the products that compute the output and the gradients.
        dropout: the probability with which a softmax probability is dropped.
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
        """The atoms (index ranges, such as heads or keys) of the attention's dimensions."""
        return self.scores.atoms

    @property
    def keys(self) -> Dimension:
        """The key dimension of the scores, as the atoms (index ranges) that it merges.

        The extra column of an attention sink is not counted.
        """
        return self.atoms.atoms(self.scores.key_dim)

    @property
    def rows(self) -> Dimension:
        """The query dimension of the scores, as the atoms (index ranges) that it consists of."""
        return self.atoms.atoms(self.query_dim)

    @property
    def of_scores(self) -> tuple[Kind, Kind]:
        """The gradients of the scores: before a factor, if there is one, and those that dK and dQ are computed from."""
        inner: Kind = "dS" if self.scores.tanh is None else "capped dS"
        return inner, inner if self.scores.factor is None else "f dS"

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which query, key and value are read: the narrowest one that occurs in the chains of all three.

        The chain of an operand is the node itself, and the nodes from which it is computed by views, casts and factors.
        None if no dtype that the kernels support is common to all three.
        """
        found = [{node.meta["val"].dtype for node in self.chains[kind]} for kind in self.chains if kind != "G"]
        common = set(DTYPES).intersection(*found)
        return min(common, key=lambda dtype: (dtype.itemsize, str(dtype)), default=None)

    def strangers(self) -> Iterator[tuple[Node, Node]]:
        """Yield (node, reader) pairs: a node that holds an intermediate tensor of attention, and an outside reader."""
        return (pair for pair in self._readers() if not _is_idle(pair[1]))

    def idle(self) -> list[Node]:
        """Return the outside readers that read nothing but sizes and that nothing reads; see `strangers`.

        Autograd leaves an empty tensor behind where a bias was added to scores in place.
        """
        return list(dict.fromkeys(user for _, user in self._readers() if _is_idle(user)))

    def release_zeros(self) -> None:
        """Forget the sums of the gradient of the scores over the keys, which are 0, that outside readers read.

        They are gradients of a bias of the rows; the program computes them from the gradient of the scores.
        """
        while read := {node for node, _ in self.strangers() if self.known[node].kind == "zero"}:
            for node in read:
                del self.known[node]

    def release_others(self) -> None:
        """Forget gradients of the probabilities that only outside readers read.

        They belong to another attention with the same value, whose gradient of the output is the same up to a constant.
        """
        while read := [
            node
            for node, value in self.known.items()
            if value.kind in ("dP", "dD") and users(node) and self.known.keys().isdisjoint(users(node))
        ]:
            for node in read:
                del self.known[node]

    def _readers(self) -> Iterator[tuple[Node, Node]]:
        for node, value in self.known.items():
            if value.kind not in PUBLIC:
                yield from ((node, user) for user in users(node) if user not in self.known)

    def is_kind(self, node: object, *kinds: Kind) -> bool:
        """Return whether a node holds a tensor of attention of one of these kinds."""
        return isinstance(node, Node) and node in self.known and self.known[node].kind in kinds

    def of(self, node: Node) -> list[Value | None]:
        """Return, for each argument of a node, which tensor of attention it holds; None where that is not known."""
        return [self.known.get(arg) if isinstance(arg, Node) else None for arg in node.args]

    def set(self, node: Node, value: Value) -> None:
        """Record which tensor of attention a node holds.  Queue its users, unless that is the output or a gradient."""
        self.known[node] = value
        if value.kind not in RESULTS:
            for user in node.users:
                self.push(user)

    def set_operand(self, node: Node, value: Value) -> None:
        """Record that a node holds query, key, value or the gradient of the output, and queue its users.

        Args:
            node: the node.
            value: which of the four it holds, with its labels and factor.
        """
        self.named.setdefault(value.kind, {})[node] = value  # type: ignore[arg-type]
        for user in node.users:
            self.push(user)

    def push(self, node: Node) -> None:
        """Queue a node for a visit; nodes are visited in the order of the graph."""
        if node in self.place:
            heapq.heappush(self._queue, (self.place[node], node))

    def turns(self) -> Iterator[Node]:
        """Yield the queued nodes in the order of the graph until the queue is empty; nodes may be queued meanwhile."""
        while self._queue:
            yield heapq.heappop(self._queue)[1]


def _is_idle(node: Node) -> bool:
    """Return whether a node reads no values and nothing reads it: without it, the graph computes the same."""
    return not node.users and op_name(node) in CREATION
