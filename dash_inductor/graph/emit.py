"""New nodes next to old ones: metadata copied, values computed on fakes, and all taken back if anything fails."""

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

# Metadata of a node's own result; all others (checkpoint tags, sequence number, source, partition) are inherited.
_OWN_META = frozenset({"val", "tensor_meta", "example_value", "eager_input_vals", "unbacked_bindings"})


class Emitter:
    """Adds nodes to a graph; `discard` takes back those that nothing uses yet."""

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
        """``target(*args, **kwargs)`` in front of `before`, with the metadata of `like` and the value of running it on
        fakes; FX makes the node's name from `name`, by default from the operator's.
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
        """``function(*tensors)`` in front of `before`, as the operators that Inductor decomposes it into.

        Args:
            with_autograd: whether the function takes gradients: it is given tensors on the CPU then, because autograd
                asks for the device, which need not be there.  The operators run on the first tensor's device.
        """
        values = [node.meta["val"] for node in tensors]
        mode, device = detect_fake_mode(values), values[0].device
        assert mode is not None, f"no fake tensor near {before.format_node()}"
        with mode, enable_python_dispatcher():
            given = map(_on_the_cpu, values) if with_autograd else values
            traced = make_fx(function, select_decomp_table())(*given)
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
        """A node in front of `before` that is ``target(*args, **kwargs)`` already; else a new one, directly behind its
        arguments, where all later nodes can share it.
        """
        sources = [arg for arg in tree_leaves(args) if isinstance(arg, Node)]
        for user in sources[0].users:
            if (user.target, user.args, user.kwargs) == (target, args, kwargs) and user < before:
                return user
        return self.call(target, args, kwargs, before=self.behind(max(sources)), like=like)

    def laid_out(self, result: Node, *, like: Node) -> Node:
        """A result with the strides of a node, in front of that node, if it is contiguous or has channels last."""
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
        """A copy of a node in front of `before`, with the strides and the metadata of `like`, a dense tensor.

        Inductor keeps the order of dimensions of contiguous tensors alone; and it takes a clone with the strides of its
        argument for one that changes nothing, and may return the argument.
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
        """The node in front of which a new node stands directly behind `node`."""
        place = node.next
        while place.op == "placeholder":
            place = place.next
        return place

    def size(self, tensor: Node, dim: int, *, before: Node, like: Node) -> int | Node:
        """A size of a tensor: its number, or one node that has it, the same for all tensors of that size."""
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
        """Erase what `call` added, latest first."""
        for node in reversed(self.created):
            self.graph.erase_node(node)
        self.created.clear()


def _on_the_cpu(value: Any) -> Any:
    """A tensor like this one, on the CPU; a number itself."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


def erase_dead(graph: Graph, nodes: list[Node], also: frozenset[Node] = frozenset()) -> None:
    """Erase the nodes of `nodes` that nothing uses, then the inputs of these that became unused, and so on.

    Placeholders and operators with effects (random numbers included) stay, unless they are in `also`.
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
