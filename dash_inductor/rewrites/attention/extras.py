"""The tensors that a call names by their place in the operators' list `extras`, as nodes of the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from ...graph import sizes as layout
from ...graph.emit import Emitter
from ...graph.nodes import is_joint
from ...masks import predicates
from ...masks.nodes import shape_of
from ...masks.token_data import Axis
from ...masks.token_vectors import PLANE
from .saved import saved, shows_input
from .seeds import seed
from .sites import Match

aten, prims = torch.ops.aten, torch.ops.prims


def extras(emitter: Emitter, match: Match, before: Node) -> list[Node]:
    """The tensors that the call reads, in front of `before`: for the mask, in the order of `sites.mask_of`; bias; seed.

    Layers with the same mask share what they can, but never a seed.
    """
    terms, graph = match.terms, _Graph(emitter, match, before)
    found: list[Node] = []
    if terms.documents is not None:
        tokens = emitter.size(match.operands.query.node, 0, before=before, like=before)
        found += terms.documents.placed(emitter, tokens, before)
    if terms.segments is not None:
        found.append(graph.vector(terms.segments.q.compute(graph), "q"))
        if not terms.segments.is_one_vector:
            found.append(graph.vector(terms.segments.kv.compute(graph), "kv"))
    if terms.keys is not None:
        found.append(graph.vector(predicates.compute(terms.keys, ("b", "kv"), graph), "kv"))
    if terms.dense is not None:
        found.append(graph.of_graph(predicates.compute(terms.dense, PLANE, graph)))
    if terms.interval is not None:
        lo, hi, number = terms.interval.compute(graph)
        found += [graph.vector(bound, "q") for bound in (lo, hi) if bound is not None]
        if number is not None and not terms.interval.is_one_vector:
            found.append(graph.vector(number, "kv"))
    if match.bias is not None:
        found.append(graph.of_four_dimensions(match.bias.tensor))
    if match.site.dropout is not None:
        found.append(seed(emitter, match, before))
    return found


@dataclass(frozen=True)
class _Graph:
    """Adds nodes to the graph; see `token_vectors.Calculator`."""

    emitter: Emitter
    match: Match
    before: Node

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> Node:
        return self.emitter.shared(operator, args, kwargs, before=self.before, like=self._mask)

    @property
    def _mask(self) -> Node:
        inputs = self.match.attention.inputs
        argument = inputs.mask or inputs.bias
        assert argument is not None
        mask: Node = argument.value
        return mask

    def tensor(self, node: Node) -> Node:
        return node

    def positions(self, axis: Axis) -> Node:
        tensor, dim = self._length(axis)
        facts = {"start": 0, "step": 1, "dtype": torch.int64, "device": tensor.meta["val"].device}
        length = self._size(tensor, dim)
        ramp = self.emitter.call(
            prims.iota.default, (length,), facts | {"requires_grad": False}, before=self.before, like=self._mask
        )
        return self.call(aten.unsqueeze.default, ramp, 0)

    def size(self, symbol: sympy.Symbol) -> Any:
        query, key = self.match.operands.query.node, self.match.operands.key.node
        for tensor, dim in ((query, 0), (query, 2), (key, 2)):
            if shape_of(tensor)[dim] == symbol:
                return self._size(tensor, dim)
        raise AssertionError(f"{symbol} is no size of the scores")

    def of_four_dimensions(self, tensor: Node) -> Node:
        """The tensor with dimensions of size 1 in front."""
        while tensor.meta["val"].dim() < 4:
            tensor = self.call(aten.unsqueeze.default, tensor, 0)
        return tensor

    def vector(self, vector: Node, axis: Axis) -> Node:
        """[batch, tokens] of a vector."""
        vector = self.of_graph(vector)
        if is_joint(self.emitter.graph):
            saved(vector)
        sizes: list[Any] = []
        for d, (tensor, dim) in enumerate(((self.match.operands.query.node, 0), self._length(axis))):
            same = layout.same(vector.meta["val"].shape[d], tensor.meta["val"].shape[dim])
            sizes.append(-1 if same else self._size(tensor, dim))
        if sizes == [-1, -1]:
            return vector
        return self.emitter.call(aten.expand.default, (vector, sizes), before=self.before, like=vector)

    def of_graph(self, data: Node) -> Node:
        """A tensor that a mask reads, safe from writes of the program until the backward has read it (see `saved`)."""
        if not is_joint(self.emitter.graph) or not shows_input(data):
            return data
        return self.call(aten.clone.default, data)

    def _length(self, axis: Axis) -> tuple[Node, int]:
        return (self.match.operands.query if axis == "q" else self.match.operands.key).node, 2

    def _size(self, tensor: Node, dim: int) -> Any:
        size = layout.static(tensor.meta["val"].shape[dim])
        return self.call(aten.sym_size.int, tensor, dim) if size is None else size
