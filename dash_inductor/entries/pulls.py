"""The gradient of a tensor that a bias is computed from, made from the bias's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..graph.emit import Emitter
from ..upstream.pytree import tree_map_only


@dataclass(frozen=True)
class Pull:
    """How a gradient follows from that of a bias.

    Attributes:
        source: finds the tensor, a node of the graph.
        bias: the node of the bias, which is computed from it.
        gradient: the graph's gradient of the tensor.
    """

    source: Callable[[], Node]
    bias: Node
    gradient: Node

    def put(self, emitter: Emitter, of_bias: Node, before: Node) -> tuple[Node, Node]:
        """The gradient that the graph reads, and the node that takes its place.

        Args:
            of_bias: the gradient of the bias, of its size.
        """
        source = self.source()
        path, others = self._between(source)

        def pulled(of_bias: Tensor, tensor: Tensor, *given: Any) -> Tensor:
            with torch.enable_grad():
                leaf = tensor.detach().requires_grad_()
                values: dict[Node, Any] = {source: leaf, **dict(zip(others, given, strict=True))}
                for node in path:
                    assert callable(node.target)
                    args, kwargs = tree_map_only(Node, values.__getitem__, (node.args, node.kwargs))
                    values[node] = node.target(*args, **kwargs)
                (found,) = torch.autograd.grad(values[self.bias], leaf, of_bias)
            return found.contiguous()

        given = (of_bias, source, *others)
        return self.gradient, emitter.inline(pulled, given, before=before, like=self.gradient, with_autograd=True)

    def _between(self, tensor: Node) -> tuple[list[Node], list[Node]]:
        """The nodes that lead from the tensor to the bias, in order, and the others that they read."""
        needed: dict[Node, bool] = {tensor: True}  # and whether it depends on the tensor

        def depends(node: Node) -> bool:
            if node not in needed:
                found = list(map(depends, node.all_input_nodes))  # all of them: it is noted of each
                needed[node] = any(found)
            return needed[node]

        depends(self.bias)
        path = sorted(node for node, leads in needed.items() if leads and node is not tensor)
        others = [source for node in path for source in node.all_input_nodes if not needed[source]]
        return path, list(dict.fromkeys(others))
