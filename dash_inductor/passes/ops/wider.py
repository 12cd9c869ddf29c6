"""Computes pointwise chains with padded columns, so that one kernel writes the padded tensor without a copy.

This is possible for a tensor that is computed elementwise from tensors of its width that already have padded columns,
from tensors that broadcast along columns, and from positions.  The whole chain is then computed for the padded columns,
too, where the final values are replaced by zeros.  For example, the gradient of padded logits is written over the
padded logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...graph import sizes
from ...graph.emit import Emitter
from ...upstream.dispatch import OpOverload

aten, prims = torch.ops.aten, torch.ops.prims

MOST_NODES = 64
"""The maximum number of nodes that are computed with padded columns; a tensor that needs more is copied."""

_VIEWS = (aten.expand.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_ALONG: Mapping[Any, int] = {aten.slice.Tensor: 1, aten.slice_scatter.default: 2}
"""Operators along one dimension, with the argument index of that dimension."""
_SUMS = (aten.sum.dim_IntList, aten.mean.dim)


class NotWider(Exception):
    """Raised if a tensor cannot be computed with padded columns; it must be copied instead."""


class Wider:
    """Emits nodes that compute tensors of `width` columns padded with zeros to `padded` columns.

    Args:
        emitter: adds the nodes.
        width, padded: the numbers of columns without and with padding.
        known: the padded tensors that the graph already has, by the tensors that they pad.
        is_padded: returns whether a node is a matmul with padded columns.
        before: the node before which nodes are added.
        like: the node whose metadata the new nodes get.
    """

    def __init__(
        self, emitter: Emitter, width: int, padded: int, known: Mapping[Node, Node],
        is_padded: Callable[[Node], bool], *, before: Node, like: Node,
    ) -> None:  # fmt: skip
        self._emitter, self._width, self._padded, self._is_padded = emitter, width, padded, is_padded
        self._before, self._like = before, like
        self._known, self._found = known, dict(known)

    def with_zeros(self, node: Node) -> Node:
        """Emits nodes that compute a tensor with zeros in the padded columns; returns the last of these nodes.

        Raises:
            NotWider: an operator cannot compute padded columns, or the nodes read nothing that is padded already.
        """
        if not _is_pointwise(_behind_views(node)):
            raise NotWider
        wide = self._wider(node)
        padded = {*self._known.values()}
        sources = {source for made in self._emitter.created for source in made.all_input_nodes}
        if not any(source in padded or self._is_padded(source) for source in sources):
            raise NotWider
        value: Tensor = node.meta["val"]
        kind = {"dtype": value.dtype, "device": value.device}
        zero = self._call(aten.scalar_tensor.default, (0.0,), {**kind, "layout": torch.strided})
        kind["dtype"] = torch.int64
        columns = self._call(
            prims.iota.default, (self._padded,), {"start": 0, "step": 1, **kind, "requires_grad": False}
        )
        seen = self._call(aten.lt.Scalar, (columns, self._width))
        return self._call(aten.where.self, (seen, wide, zero))

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        return self._emitter.call(target, args, kwargs, before=self._before, like=self._like)

    def _wider(self, node: Node) -> Node:
        """The tensor with arbitrary values in padded columns; a tensor that broadcasts along columns is not changed."""
        found = self._found.get(node)
        if found is None:
            if len(self._emitter.created) >= MOST_NODES:
                raise NotWider
            found = self._found[node] = self._made(node)
        return found

    def _made(self, node: Node) -> Node:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):  # a size
            return node
        columns = sizes.static(value.shape[-1]) if value.dim() else 1
        if columns == 1:
            return node
        if columns != self._width:
            raise NotWider
        made = self._computed(node) if node.op == "call_function" else None
        return made or self._call(aten.constant_pad_nd.default, (node, [0, self._padded - self._width], 0.0))

    def _computed(self, node: Node) -> Node | None:
        """The tensor computed from wider ones; None if it has to be read and padded with zeros instead."""
        args: tuple[Any, ...] = node.args
        dims: int = node.meta["val"].dim()
        if node.target is aten.slice.Tensor and self._is_product(node):
            return args[0]  # type: ignore[no-any-return]
        if node.target is prims.iota.default:
            return self._call(node.target, (self._padded,), dict(node.kwargs))
        if node.target is aten.full.default:
            return self._call(node.target, (self._resized(args[0]), *args[1:]), dict(node.kwargs))
        if node.target in _VIEWS:
            source = args[0].meta["val"]
            if source.dim() and sizes.static(source.shape[-1]) not in (1, self._width):
                return None
            return self._call(node.target, (self._wider(args[0]), self._resized(args[1])))
        if node.target is aten.clone.default:
            return self._call(node.target, (self._wider(args[0]),), dict(node.kwargs))
        if node.target is aten.unsqueeze.default and args[1] % dims != dims - 1:
            return self._call(node.target, (self._wider(args[0]), args[1]))
        along = _ALONG.get(node.target)
        if along is not None:
            tensors, dim = args[:along], args[along] if len(args) > along else 0
            if dim % dims == dims - 1:
                return None
            return self._call(node.target, (*map(self._wider, tensors), *args[along:]), dict(node.kwargs))
        if _is_pointwise(node) and not any(isinstance(arg, (list, tuple)) for arg in args):
            given = tuple(self._wider(arg) if isinstance(arg, Node) else arg for arg in args)
            return self._call(node.target, given, dict(node.kwargs))
        return None

    def _is_product(self, node: Node) -> bool:
        """Whether a slice selects the unpadded columns of a padded product."""
        source: Any = node.args[0]
        value: Tensor = source.meta["val"]
        whole = all(sizes.same(a, b) for a, b in zip(value.shape[:-1], node.meta["val"].shape[:-1], strict=True))
        return whole and self._is_padded(source) and sizes.static(value.shape[-1]) == self._padded

    def _resized(self, shape: Any) -> list[Any]:
        return [*shape[:-1], self._padded]


def _behind_views(node: Node) -> Node:
    """The tensor of which a node is a view or copy with another shape."""
    while node.target in _VIEWS or node.target is aten.clone.default:
        source: Any = node.args[0]
        node = source
    return node


def _is_pointwise(node: Node) -> bool:
    """Whether an operator is elementwise and draws no random numbers."""
    target = node.target
    if target is prims.convert_element_type.default:
        return True
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags


def read_padded(emitter: Emitter, narrow: Node, padded: Node, chain: Set[Node]) -> None:
    """Makes elementwise and summing readers of a tensor read the columns of its padded version instead.

    Args:
        emitter: adds the nodes.
        narrow: the tensor.
        padded: its padded version, of which the readers get a slice.
        chain: the nodes that compute the padded version; these keep reading `narrow`.
    """
    readers = [user for user in narrow.users if user not in chain and (_is_pointwise(user) or user.target in _SUMS)]
    if not readers:
        return
    value: Tensor = narrow.meta["val"]
    arguments = padded, value.dim() - 1, 0, value.shape[-1]
    shown = emitter.call(aten.slice.Tensor, arguments, before=emitter.behind(padded), like=narrow)
    for reader in readers:
        reader.replace_input_with(narrow, shown)
