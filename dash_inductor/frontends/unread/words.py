"""Describes why an attention cannot be read, for its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from ...graph import sizes
from ...graph.nodes import op_name
from .products import shape_of

ONE_MORE = "softmax with one more in the sum"
SUMS = ("aten::add", "aten::sub")
COMBINED = "no (P1 - c * P2) @ V in which nothing else reads P1 - c * P2, and c does not vary along the keys"
"""Describes sums and differences of probabilities that multiply value and are not replaced."""
NAN = "NaN among the scores becomes a number, as by nan_to_num"
_SIMPLE = frozenset({
    "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::permute", "aten::transpose", "aten::t", "aten::expand",
    "aten::unsqueeze", "aten::squeeze", "aten::clone", "aten::alias", "aten::detach", "prims::convert_element_type",
    "aten::_to_copy", "aten::mul", "aten::div", "aten::add", "aten::sub", "aten::exp", "aten::sum", "aten::amax",
    "aten::where", "aten::masked_fill", "aten::_softmax", "aten::_safe_softmax", "aten::select", "aten::slice",
})  # fmt: skip
_LOGS = ("aten::_log_softmax", "aten::log_softmax", "aten::log", "aten::logsumexp")
_JOINED = ("aten::cat", "aten::constant_pad_nd")
_CONSTANTS = (
    "aten::full",
    "aten::zeros",
    "aten::full_like",
    "aten::zeros_like",
    "aten::new_zeros",
    "aten::scalar_tensor",
)


@dataclass(frozen=True)
class Way:
    """An attention that no frontend reads, given by its nodes from its first product to its second, in graph order.

    Attributes:
        before: the nodes between the first product and the normaliser, including the sums by which it divides.
        normaliser: the node that normalises, such as a softmax or a division by a sum.
        after: the nodes between the normaliser and the second product.
        second: the second product.
        products: the products of two tensors among all these nodes.
    """

    before: Sequence[Node]
    normaliser: Node
    after: Sequence[Node]
    second: Node
    products: frozenset[Node]

    def in_words(self) -> str:
        """Return why it cannot be read: a known form that is not supported, else the first operator without support."""
        parts = self._mixed(), self._joined(), self._written(), self._without_nan(), self._combined()
        found = dict.fromkeys(filter(None, parts))
        if found:
            return "; ".join(found)
        for node in (*self.before, *self.after):
            if op_name(node) not in _SIMPLE and node not in self.products:
                return f"{op_name(node) or node.op} ({node.name})"
        return f"no reader knows how it is normalised ({self.normaliser.name})"

    def _mixed(self) -> str:
        for nodes, when in ((self.before, "before"), (self.after, "after")):
            if any(node in self.products and op_name(node) not in ("aten::sum", "aten::mul") for node in nodes):
                return f"heads are mixed {when} the softmax (talking heads)"
        return ""

    def _without_nan(self) -> str:
        names = [node.name for node in self.before if op_name(node) == "aten::isnan"]
        return f"{NAN} ({names[0]})" if names else ""

    def _combined(self) -> str:
        """Return a description of a sum of two tensors that are computed from the probabilities; "" without one."""
        own = {self.normaliser, *self.after}
        for node in self.after:
            if op_name(node) in SUMS and len(own.intersection(node.all_input_nodes)) == 2:
                return f"{COMBINED} ({node.name})"
        return ""

    def _joined(self) -> str:
        for place, node in enumerate(self.before):
            if op_name(node) not in _JOINED:
                continue
            whole, parts = shape_of(node), node.all_input_nodes
            if op_name(node) == "aten::constant_pad_nd":
                return ONE_MORE
            scores = max(parts, key=lambda part: part in self.before)
            others = [part for part in parts if part is not scores]
            if all(_is_constant(part) for part in others):
                return ONE_MORE
            given: object = node.args[0]
            in_front = isinstance(given, (list, tuple)) and given[0] is not scores
            widths = [sizes.static(shape_of(part)[-1]) for part in others if len(shape_of(part)) == len(whole)]
            number = sum(width or 0 for width in widths)
            words = [f"{ {1: 'a sink', 2: 'two sinks'}.get(number, 'sinks') }"]
            words += ["before the keys"] if in_front else []
            scaled = any(op_name(later) in ("aten::mul", "aten::div") for later in self.before[place + 1 :])
            words += ["scaled with the scores"] if scaled and not _divides(self.before[place + 1 :]) else []
            return " ".join(words)
        return ""

    def _written(self) -> str:
        """Return a description of a softmax that is not written as PyTorch writes it; "" for others."""
        if any(op_name(node) in _LOGS for node in self.before):
            return "log_softmax and exp"
        if self.normaliser in (self.second, *self.after[-1:]) or self.second < self.normaliser:
            return "divided after the second product"
        exponentials = [node for node in self.before if op_name(node) == "aten::exp"]
        behind = exponentials[-1:] or self.before[:1]
        sums = [node for node in self.before if op_name(node) == "aten::sum" and not node < behind[0]]
        for user in (user for node in sums for user in node.users if user in self.before):
            if op_name(user) == "aten::add" and not _is_small(user.args[1]):
                return ONE_MORE
        if exponentials and any(source is not exponentials[-1] for node in sums for source in node.all_input_nodes):
            return "masked exponentials divided by their sum"
        return ""


def _divides(nodes: Sequence[Node]) -> bool:
    """Return whether these nodes contain no scaling, so that a division among them is that of the softmax."""
    return not any(op_name(node) in ("aten::mul", "aten::div") and len(node.all_input_nodes) == 1 for node in nodes)


def _is_small(added: object) -> bool:
    """Return whether an added number merely keeps a sum from being zero."""
    return isinstance(added, (int, float)) and abs(added) < 0.01


def _is_constant(node: Node) -> bool:
    while op_name(node) in ("aten::expand", "aten::view", "prims::convert_element_type", "aten::unsqueeze"):
        (node, *_) = node.all_input_nodes
    return op_name(node) in _CONSTANTS
