"""Factors of scores that no kernel knows, such as a learned scale of each head.

A score is ``f * (q . k)``.  Where f is a number of a query or of a key alone, this package multiplies query or key by f
and calls the attention on the product.  With q' = f * q, the gradient of q is f times that of q', and the gradient of f
is the sum of the products of q with the gradient of q'.  No division by f occurs, so that f may be zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch.fx import Node

from ..graph.emit import Emitter
from ..graph.nodes import Argument, op_name
from ..masks.bounds import bounds

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

_KEEP_INFINITY = frozenset(
    f"aten::{name}"
    for name in (
        *("where", "mul", "div", "add", "sub", "rsub", "neg", "abs", "masked_fill", "cat", "stack", "full", "fill"),
        *("full_like", "scalar_tensor", "_to_copy", "alias", "clone", "detach", "expand", "permute", "select", "slice"),
        *("squeeze", "t", "transpose", "unsqueeze", "view", "_unsafe_view", "index", "gather", "repeat", "copy"),
        *("slice_scatter", "select_scatter", "index_put", "scatter", "constant_pad_nd", "flip", "roll", "cumsum"),
        *("reciprocal", "rsqrt", "log", "log2", "log10", "pow"),
    )
) | {"prims::convert_element_type", "prims::rev"}
"""Operators whose results may be infinite where an operand is; `clamp` and `exp`, for example, may make it finite."""


_DIVISORS = {"aten::div": 1} | dict.fromkeys(
    ("aten::reciprocal", "aten::rsqrt", "aten::log", "aten::log2", "aten::log10", "aten::pow"), 0
)
"""Operators that are infinite where an operand is 0, and the place of that operand; powers if they are negative."""


def infinity_in(factor: Node) -> Node | None:
    """Return a node that gives a factor an infinite number or a NaN, whatever the data are; None without one.

    That is a number in the graph, or a quotient by positions or a logarithm of them that may be 0.  Such a number may
    hide scores, as a factor of minus infinity hides positive ones.  Products of it with query or key are NaN where
    their signs are mixed.
    """
    stack, seen = [factor], set[Node]()
    while stack:
        node = stack.pop()
        if node in seen or (node.op == "call_function" and op_name(node) not in _KEEP_INFINITY):
            continue
        seen.add(node)
        stack += node.all_input_nodes
        divisor = node.args[_DIVISORS[op_name(node)]] if op_name(node) in _DIVISORS else None
        if op_name(node) == "aten::pow" and not (isinstance(node.args[1], (int, float)) and node.args[1] < 0):
            divisor = None
        between = bounds(divisor) if isinstance(divisor, Node) else None
        if between is not None and between[0] <= 0.0 <= between[1]:
            return node
        numbers = [*node.args, *node.kwargs.values()] if node.op == "call_function" else []
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            return node
        held = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(held, torch.Tensor) and type(held) is torch.Tensor and not bool(held.isfinite().all()):
            return node
    return None


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
