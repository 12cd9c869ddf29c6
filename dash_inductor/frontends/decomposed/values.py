"""Identifies the nodes around a softmax as tensors of attention, in the forward and in its autograd derivative.

A `Value` is a tensor of attention times a constant.  Starting from the softmax, rules identify users of known nodes
until no rule applies (`rules`, `products`, `operands`).  Rounding to another dtype does not change a value.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from ...graph.nodes import op_name
from .known import Known
from .labels import CAST, COPIES, VIEWS, Labels
from .one_more import OneMore
from .operands import name_operand
from .products import is_outer, look_for_gradient, product, product_of_scores
from .rules import RULES, result_of_maximum
from .scores import PRODUCTS, constant_factor
from .value import Value

_WITH_FACTOR = (
    "keep", "P", "D", "dD", "dP", "P dP", "rowsum", "P rowsum", "dP - rowsum", "dS", "capped dS", "zero", "f dS",
    "R dS", "rest", "P / sum", "dP / sum", "dP P / sum", "rowsum / sum", "rest rowsum / sum", "dE",
)  # fmt: skip


class Values(Known):
    """Identifies the nodes around a softmax as tensors of attention, and holds what it has found (see `Known`)."""

    def run(self, exponential: Node, totals: Sequence[Node], quotient: Node, one_more: OneMore | None) -> None:
        """Identify all nodes of the attention, starting from the softmax.

        Args:
            exponential, totals, quotient: the nodes of the softmax: the exponential, its sum, which may be that with
                one more, and their quotient.
            one_more: what is added to the sum; None for nothing.

        Raises:
            Stuck: the products are not those of attention.
            NotAttention: the softmax is certainly not part of attention.
        """
        labels = self.scores.labels
        for node, own in labels.items():
            self.set(node, Value("score", own))
        if self.scores.tanh is not None:
            self.set(self.scores.tanh, Value("tanh", labels[self.scores.tanh]))
        of_exponent = labels[next(iter(labels))]
        self.set(exponential, Value("exponential", of_exponent))
        for total in totals:
            self.set(total, Value("sum"))
        if one_more is not None:
            self._take(one_more, of_exponent)
        self.set(quotient, Value("P", of_exponent))
        product_of_scores(self)
        self._work()
        if "G" not in self.named and "O" in self.results:
            look_for_gradient(self)
            self._work()

    def _take(self, one_more: OneMore, labels: Labels) -> None:
        """Identify the nodes of what is added to the sum; `labels` are those of the scores."""
        self.set(one_more.shifted, Value("score", labels))
        for node in one_more.between:
            self.set(node, Value("row"))
        if one_more.exponential is not None:
            wide, score = self.atoms.atoms(self.scores.wide_dim), one_more.score
            rows = tuple(() if self.atoms.atoms(dim) == wide else dim for dim in labels)
            self.set(one_more.exponential, Value("rest", rows, math.exp(-score)))

    def _work(self) -> None:
        for node in self.turns():
            if node.op != "call_function":
                continue
            for kind in self.named:
                name_operand(self, kind, node)
            if node not in self.known:
                value = self._value(node)
                if value is not None:
                    self.set(node, value)

    def _value(self, node: Node) -> Value | None:
        name = op_name(node)
        if node.target is operator.getitem:
            return result_of_maximum(self, node)
        if name in PRODUCTS:
            return product(self, node)
        if is_outer(node):
            found = product(self, node)
            if found is not None:
                return found
        first = self.known.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        if first is not None:
            if first.kind == "zero" and name in (*VIEWS, *COPIES, CAST, "aten::expand", "aten::permute"):
                return first
            if first.kind in ("keep", "row") and name == CAST:
                return first
            labels = self.atoms.through(node, first.labels)
            if labels is not None:
                return replace(first, labels=labels)
            if name == "aten::expand" and first.kind in ("row", "rowsum", "rowsum / sum", "flag"):
                return first
        factor = constant_factor(node)
        if factor is not None and factor[0] in self.known:
            value = self.known[factor[0]]
            return replace(value, factor=value.factor * factor[1]) if value.kind in _WITH_FACTOR else None
        rule = RULES.get(name)
        return None if rule is None else rule(self, node)
