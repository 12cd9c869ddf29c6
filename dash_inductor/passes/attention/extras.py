"""Builds `extras`, the attention operators' list of optional tensors, as graph nodes.

An attention spec, which says what an attention computes, refers to the entries of this list by index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from ...graph import sizes as layout
from ...graph.emit import Emitter
from ...graph.nodes import is_joint
from ...graph.views import shows_input
from ...masks.nodes import shape_of
from ...masks.token_data import Axis
from ...model.components import COMPONENTS
from ...model.operands import OPERANDS
from .match import Match
from .saved import saved
from .seeds import seed

aten, prims = torch.ops.aten, torch.ops.prims


def extras(emitter: Emitter, match: Match, before: Node) -> list[Node]:
    """Inserts, before the node `before`, the extra tensors that forward and backward of an attention both read.

    Returns:
        The nodes of the mask's tensors, in the order of `reading.mask_of`, then those of optional operands, in the
        order of `OPERANDS`.  Layers with the same mask share its nodes; the seed of dropout is always a layer's own.
    """
    components, graph = match.components, _Graph(emitter, match, before)
    found: list[Node] = []
    if components.documents is not None:
        tokens = emitter.size(match.operands.query.node, 0, before=before, like=before)
        found += components.documents.varlen_layout(emitter, tokens, before)
    for component in components.in_order:
        axes = COMPONENTS[component.NAME].AXES
        for name, value in component.compute(graph).items():
            if "h" in axes[name]:
                found.append(graph.of_heads(value, saves=COMPONENTS[component.NAME].BY_HEAD))
            else:
                found.append(graph.vector(value, "q" if "q" in axes[name] else "kv"))
    for name in match.site.spec.given:
        if OPERANDS[name].side == "both":
            found.append(_operand(name, graph))
    return found


def _operand(name: str, graph: _Graph) -> Node:
    """An optional operand by its name in `OPERANDS`."""
    match = graph.match
    if name == "dropout":
        return seed(graph.emitter, match, graph.before)
    source = match.bias.source if name == "bias" and match.bias is not None else getattr(match.attention.inputs, name)
    return graph.of_dimensions(source.value, len(OPERANDS[name].axes))


@dataclass(frozen=True)
class _Graph:
    """The `token_vectors.Calculator` that computes mask tensors by adding nodes to the graph."""

    emitter: Emitter
    match: Match
    before: Node

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> Node:
        return self.emitter.shared(operator, args, kwargs, before=self.before, like=self._mask)

    @property
    def _mask(self) -> Node:
        inputs = self.match.attention.inputs
        argument = inputs.mask or inputs.bias or inputs.slopes
        assert argument is not None
        mask: Node = argument.value
        return mask

    def tensor(self, node: Node) -> Node:
        return node

    def positions(self, axis: Axis) -> Node:
        tensor, dim = self._length(axis)
        device = tensor.meta["val"].device
        facts = {"start": 0, "step": 1, "dtype": torch.int64, "device": device, "requires_grad": False}
        given = (prims.iota.default, (self._size(tensor, dim),), facts)
        for node in self.emitter.graph.find_nodes(op="call_function", target=given[0]):
            if (node.target, node.args, node.kwargs) == given and node < self.before:
                return self.call(aten.unsqueeze.default, node, 0)
        return self.call(aten.unsqueeze.default, self.emitter.call(*given, before=self.before, like=self._mask), 0)

    def size(self, symbol: sympy.Symbol) -> Any:
        query = self.match.operands.query
        for tensor, dim in ((query.node, query.dim(0)), self._length("q"), self._length("kv")):
            if shape_of(tensor)[dim] == symbol:
                return self._size(tensor, dim)
        raise AssertionError(f"{symbol} is no size of the scores")

    def of_dimensions(self, tensor: Node, count: int) -> Node:
        """Unsqueezes leading dimensions until the tensor has this many."""
        while tensor.meta["val"].dim() < count:
            tensor = self.call(aten.unsqueeze.default, tensor, 0)
        return tensor

    def of_heads(self, data: Node, *, saves: bool) -> Node:
        """Returns a mask tensor of four dimensions; with `saves`, a joint graph saves it for the backward."""
        data = self.of_dimensions(self.of_graph(data), 4)
        if saves and is_joint(self.emitter.graph):
            saved(data)
        return data

    def vector(self, vector: Node, axis: Axis) -> Node:
        """Expands a vector to [batch, q_len or kv_len], and saves it for the backward in a joint graph."""
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
        """Clones a mask tensor that shows a graph input, so that later in-place writes cannot change the backward.

        See Note [What the backward reads] in `saved`.
        """
        if not is_joint(self.emitter.graph) or not shows_input(data):
            return data
        return self.call(aten.clone.default, data)

    def _length(self, axis: Axis) -> tuple[Node, int]:
        view = self.match.operands.key if axis == "kv" else self.match.operands.query
        return view.node, view.dim(1 if axis == "h" else 2)

    def _size(self, tensor: Node, dim: int) -> Any:
        size = layout.static(tensor.meta["val"].shape[dim])
        return self.call(aten.sym_size.int, tensor, dim) if size is None else size
