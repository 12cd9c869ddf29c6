"""Adds nodes to a graph, with metadata of an existing node and fake values; all can be removed on failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from ..upstream.decomposing import enable_python_dispatcher, make_fx, select_decomp_table
from ..upstream.fake import detect_fake_mode
from ..upstream.pytree import tree_leaves, tree_map_only
from . import sizes

aten = torch.ops.aten

# Metadata of a node's own result; the rest (checkpoint tags, sequence number, source, partition) is copied from `like`.
_OWN_META = frozenset({"val", "tensor_meta", "example_value", "eager_input_vals", "unbacked_bindings"})


class Emitter:
    """Adds nodes to a graph; `discard` removes all of them, before anything else uses them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.created: list[Node] = []

    def call(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        before: Node,
        like: Node,
        name: str | None = None,
    ) -> Node:
        """Add a node ``target(*args, **kwargs)`` before `before`, with the metadata of `like` and its own fake value.

        FX derives the node's name from `name`, by default from the operator's name.
        """
        with self.graph.inserting_before(before):
            node = self.graph.create_node("call_function", target, args, kwargs, name)
        self.created.append(node)
        node.meta = {k: v for k, v in like.meta.items() if k not in _OWN_META}
        values, named = tree_map_only(Node, lambda n: n.meta["val"], (args, kwargs or {}))
        mode = detect_fake_mode((values, named, before.meta.get("val"), like.meta.get("val")))
        assert mode is not None, f"no fake tensor near {node.format_node()}"
        with mode:
            node.meta["val"] = target(*values, **named)
        return node

    def inline(
        self,
        function: Callable[..., torch.Tensor],
        tensors: tuple[Node, ...],
        *,
        before: Node,
        like: Node,
        with_autograd: bool = False,
    ) -> Node:
        """Add nodes for ``function(*tensors)`` before `before`, decomposed into the operators that Inductor uses.

        Args:
            function: a function of tensors.
            tensors: the nodes of its arguments.
            before: the node before which the nodes are added.
            like: the node whose metadata they get.
            with_autograd: whether the function calls autograd.  It is then traced on CPU tensors, because autograd
                queries the device, which need not exist on this machine.  The added operators run on the first tensor's
                device.
        """
        values = [node.meta["val"] for node in tensors]
        mode, device = detect_fake_mode(values), values[0].device
        assert mode is not None, f"no fake tensor near {before.format_node()}"
        with mode, enable_python_dispatcher():
            given = map(_on_the_cpu, values) if with_autograd else values
            traced = make_fx(function, select_decomp_table())(*given)
        traced.graph.eliminate_dead_code()  # decompositions may leave conversions that nothing reads
        copies: dict[Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), tensors, strict=True))
        for node in (node for node in traced.graph.nodes if node.op == "call_function"):
            args, kwargs = tree_map_only(Node, copies.__getitem__, (node.args, node.kwargs))
            if with_autograd:
                args, kwargs = tree_map_only(torch.device, lambda _: device, (args, kwargs))
            copies[node] = self.call(node.target, args, kwargs, before=before, like=like, name=node.name)
        (result,) = traced.graph.output_node().all_input_nodes
        found: Node = copies[result]
        return found

    def shared(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, before: Node, like: Node
    ) -> Node:
        """Return an existing node before `before` that is ``target(*args, **kwargs)``, else a new one.

        A new node is placed directly after its arguments, so that all later nodes can share it.
        """
        sources = [arg for arg in tree_leaves(args) if isinstance(arg, Node)]
        for user in sources[0].users:
            if (user.target, user.args, user.kwargs) == (target, args, kwargs) and user < before:
                return user
        return self.call(target, args, kwargs, before=self.behind(max(sources)), like=like)

    def laid_out(self, result: Node, *, like: Node) -> Node:
        """Return a copy of `result` with the strides of `like`, added before `like`.

        Return `result` itself if its strides are equal already, or if `like` is neither contiguous nor channels-last.
        """
        wanted, value = like.meta["val"], result.meta["val"]
        if sizes.same_all(wanted.stride(), value.stride()):
            return result
        for dims, layout in (
            (value.dim(), torch.contiguous_format),
            (4, torch.channels_last),
            (5, torch.channels_last_3d),
        ):
            if value.dim() == dims and wanted.is_contiguous(memory_format=layout):
                return self.call(aten.clone.default, (result,), {"memory_format": layout}, before=like, like=like)
        return result

    def copied(self, node: Node, *, before: Node, like: Node) -> Node:
        """Add nodes before `before` that copy the tensor `node`, and return the copy.

        It has the strides and the metadata of `like`, whose tensor must be dense.

        Inductor may change the strides of a copy that is not contiguous, so a contiguous copy is permuted; and it may
        replace a clone that keeps the strides by its argument, so `lift_fresh_copy` copies.
        """
        value: torch.Tensor = like.meta["val"]
        order = sizes.dense_order(value.shape, value.stride())
        assert order is not None, f"{like.format_node()} is not dense"
        if order == tuple(range(len(order))):
            return self.call(aten.lift_fresh_copy.default, (node,), before=before, like=like)
        inverse = [order.index(dim) for dim in range(len(order))]
        found = self.call(aten.permute.default, (node, list(order)), before=before, like=like)
        found = self.call(aten.lift_fresh_copy.default, (found,), before=before, like=like)
        return self.call(aten.permute.default, (found, inverse), before=before, like=like)

    @staticmethod
    def behind(node: Node) -> Node:
        """Return the node before which to insert a new node so that it follows `node` and the placeholders."""
        place = node.next
        while place.op == "placeholder":
            place = place.next
        return place

    def size(self, tensor: Node, dim: int, *, before: Node, like: Node) -> int | Node:
        """Return a size of a tensor: a number if it is static, else a node, the same for all tensors of that size."""
        size = tensor.meta["val"].shape[dim]
        known = sizes.static(size)
        if known is not None:
            return known
        node: Node
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr == size.node.expr and node < before:
                return node
        return self.shared(aten.sym_size.int, (tensor, dim), {}, before=before, like=like)

    def discard(self) -> None:
        """Erase all nodes that were added, latest first."""
        for node in reversed(self.created):
            self.graph.erase_node(node)
        self.created.clear()


def _on_the_cpu(value: Any) -> Any:
    """Return an empty CPU tensor like this one; other values unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


def erase_dead(graph: Graph, nodes: list[Node], also: frozenset[Node] = frozenset()) -> None:
    """Erase those of `nodes` that have no users, then their inputs that have become unused, and so on.

    Placeholders and operators with effects (including random ones) stay, unless they are in `also`.
    """
    seen = set()
    while nodes:
        node = nodes.pop()
        if node in seen or node.users or (node.is_impure() and node not in also):
            continue
        seen.add(node)
        sources = node.all_input_nodes
        graph.erase_node(node)
        nodes.extend(sources)
