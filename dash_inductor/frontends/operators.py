"""Attention operators in pairs: a forward, with output and log-sum-exp, and its backward, with the gradients."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from ..graph.nodes import Argument, bind, op_name, origin, untouched
from ..model.plan import Fallback
from ..model.reasons import Reason
from .attention import Axes, Inputs, Output, Refusal, View, is_alone, tensors_of
from .logsumexp import LogSumExp


@dataclass(frozen=True)
class Pair:
    """A forward and a backward operator of attention that can be replaced, and how their arguments are named.

    Attributes:
        forward, backward: qualified names, such as "aten::_scaled_dot_product_flash_attention".
        grad_out: the name of the backward's argument that holds the gradient of the output.
        mask: the name of the argument that holds an additive or boolean mask; None if the operators take none.
        random_state: the names of the arguments by which the backward knows the random numbers of its forward's
            dropout.
        axes: the order of the dimensions of query, key, value, output and their gradients.
        renamed: the operators' own argument names, by the names that all pairs share; arguments whose own name is the
            shared one may be left out.
        without_keys: the log-sum-exp of a query that sees no key; None if it is unknown.
        multiple: the length of the log-sum-exp is padded to a multiple of this.
    """

    forward: str
    backward: str
    grad_out: str = "grad_out"
    mask: str | None = None
    random_state: tuple[str, ...] = ("philox_seed", "philox_offset")
    axes: Axes = "bhsd"
    renamed: Mapping[str, str] = field(default_factory=dict)
    without_keys: float | None = None
    multiple: int = 1

    def is_backward(self, node: Node) -> bool:
        """Return whether a node calls the backward operator of this pair."""
        return op_name(node) == self.backward

    def arguments(self, node: Node) -> dict[str, Any]:
        """Return the arguments of a call by their shared names (see `renamed`), with the schema's defaults.

        `dropout_p` is 0 for operators without it.
        """
        names = {own: shared for shared, own in self.renamed.items()}
        return {"dropout_p": 0.0} | {names.get(name, name): value for name, value in bind(node).items()}

    def argument(self, node: Node, name: str) -> Argument:
        """Return an argument of a call, given by the name that all pairs share (see `renamed`)."""
        return Argument(node, self.renamed.get(name, name))

    def view(self, node: Node, name: str) -> View:
        """Return the tensor argument of a call that has this shared name, as a `View`."""
        return View(self.argument(node, name), self.axes)

    def inputs(self, node: Node, **others: Any) -> Inputs:
        """Return the `Inputs` of a call: query, key, value, scale, dropout, and the document offsets of packed tokens.

        Args:
            node: the call.
            others: further fields of `Inputs`.
        """
        args = self.arguments(node)
        query, key, value = (self.view(node, name) for name in ("query", "key", "value"))
        if self.axes == "thd":
            starts = [args[name] for name in ("cu_seq_q", "cu_seq_k")]
            others["documents"] = self.argument(node, "cu_seq_q")
            others["data"] = tuple(start for start in starts if isinstance(start, Node))
        return Inputs(query, key, value, args["scale"], args["dropout_p"], **others)

    def forward_of(self, backward: Node) -> Node | None:
        """Return the forward that computed a backward's `out` and `logsumexp`; None if it is not in the graph."""
        out, logsumexp = (untouched(self.argument(backward, name).value) for name in ("out", "logsumexp"))
        for result, index in ((out, 0), (logsumexp, 1)):
            if result.target is not operator.getitem or result.args[1] != index:
                return None
        forward = out.args[0]
        assert isinstance(forward, Node)
        return forward if forward is logsumexp.args[0] and op_name(forward) == self.forward else None

    def merged_from(self, backward: Node) -> tuple[Node, ...]:
        """Return the forward calls from whose results a backward's `logsumexp` is computed.

        Context parallel merges the forwards of several parts of the keys, and each part has a backward that reads the
        merged results.  The result is empty if one forward alone computed `logsumexp` (`forward_of`).
        """
        start = self.argument(backward, "logsumexp").value
        if self.forward_of(backward) is not None or not isinstance(start, Node):
            return ()
        found, seen, left = dict[Node, None](), {start}, [start]
        while left:
            node = left.pop()
            if op_name(node) == self.forward:
                found[node] = None
                continue
            left += [source for source in node.all_input_nodes if source not in seen]
            seen.update(node.all_input_nodes)
        return tuple(node for node in backward.graph.nodes if node in found)

    def without_dropout(self, forward: Node) -> frozenset[Node]:
        """Return the backwards without dropout that take a forward's random state, but none of its other results."""
        given = {reader for result in forward.users for reader in result.users if self.is_backward(reader)}
        return frozenset(
            reader
            for reader in given
            if self.arguments(reader)["dropout_p"] == 0.0
            and not any(origin(self.argument(reader, name).value) in forward.users for name in ("out", "logsumexp"))
        )

    def logsumexp(self, forward: Node) -> LogSumExp:
        """Return the log-sum-exp of a forward call, its second result."""
        return LogSumExp(forward, 1, without_keys=self.without_keys, multiple=self.multiple)

    def gradients(self, backward: Node) -> tuple[Output, Output, Output]:
        """Return the sinks of a backward call's gradients of query, key and value, its first three results."""
        return Output(backward, 0, self.axes), Output(backward, 1, self.axes), Output(backward, 2, self.axes)


@dataclass(frozen=True)
class Refused:
    """A forward and a backward operator of PyTorch that are recognised, but never replaced.

    Attributes:
        forward, backward: qualified names.
        reason, note: why they are not replaced, and a note for the record; "" without one.
    """

    forward: str
    backward: str
    reason: Reason
    note: str = ""

    def refusal(self, node: Node) -> Refusal:
        """Return the refusal of a call of either operator, whose first arguments are query, key and value."""
        name = op_name(node)
        fallback = Fallback(self.reason, "; ".join(filter(None, (name, self.note))))
        return Refusal(node, name, fallback, name == self.backward, tensors_of(node.args[:3]))


def calls(graph: Graph, pairs: Iterable[Pair | Refused]) -> Iterator[tuple[Pair | Refused, Node]]:
    """Yield (pair, node) for each attention in a graph that calls one of these operators.

    The node is the call of the backward operator or, for a forward without a backward in the graph, that of the
    forward.
    """
    by_backward = {pair.backward: pair for pair in pairs}
    by_forward = {pair.forward: pair for pair in by_backward.values()}
    found = [(node, op_name(node)) for node in graph.nodes]
    backwards = [(pair, node) for node, name in found if isinstance(pair := by_backward.get(name), Pair)]
    paired = {forward for pair, node in backwards for forward in _forwards_of(pair, node)}
    for node, name in found:
        if name in by_backward:
            yield by_backward[name], node
        elif name in by_forward and node not in paired:
            pair = by_forward[name]
            if is_alone(node, {pair.backward} if isinstance(pair, Refused) else frozenset()):
                yield pair, node


def _forwards_of(pair: Pair, backward: Node) -> Iterator[Node | None]:
    """Yield the result of `Pair.forward_of`.

    If the arguments are unknown, yield all nodes that computed the backward's inputs.
    """
    try:
        yield pair.forward_of(backward)
    except (TypeError, KeyError, ValueError):
        results = [node for node in map(untouched, backward.all_input_nodes) if node.target is operator.getitem]
        yield from (source for node in results for source in node.all_input_nodes)
