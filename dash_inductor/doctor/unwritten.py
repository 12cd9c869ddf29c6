"""Finds memory of `torch.empty` that a graph reads before it has written it.

A mask of every such tensor, and of what is made of it, says which of its elements have been written. Operators that
move elements are run on the masks. What mutates a tensor by a kernel of its own is trusted to write all of it, as is
what writes to places that depend on data.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph.model_line import model_line
from ..upstream.dispatch import OpOverload

_MAKES = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
_IGNORES = frozenset((
    "copy", "fill", "zero", "full_like", "zeros_like", "ones_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_full", "normal_functional", "uniform", "exponential", "cauchy", "log_normal",
    "geometric", "random", "index_put", "scatter", "index_copy", "masked_scatter", "sym_size", "sym_stride",
    "sym_numel", *_MAKES,
))  # fmt: skip
"""Operators that read no value of their first argument, or write places of it that only data know."""

_MOVES = frozenset((
    "alias", "as_strided", "as_strided_scatter", "cat", "clone", "detach", "diagonal", "diagonal_scatter", "expand",
    "flip", "permute", "reshape", "select", "select_scatter", "slice", "slice_scatter", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
))  # fmt: skip
"""Operators that move elements of tensors, and compute nothing."""

_SAME = ("_to_copy", "convert_element_type")
"""Operators that compute each element from that of the same place."""

_MOST = 1 << 24
"""The largest number of elements of a tensor that is followed."""


def reads_unwritten(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yields where a graph reads memory that it has not written: the line that makes it, and how it is read."""
    masks: dict[Node, Any] = {}
    made: dict[Node, Node] = {}  # what an incomplete tensor comes from
    for node in graph.nodes:
        name = _name(node)
        sources = [source for source in node.all_input_nodes if source in masks]
        if name in _MAKES:
            if (mask := _unwritten(node)) is not None:
                masks[node], made[node] = mask, node
        elif not sources:
            continue
        elif node.op == "output":
            yield from ((_line(made[source]), "is a result") for source in sources)
        elif (moved := _moved(node, name, masks)) is not None:
            if not _is_whole(moved):
                masks[node], made[node] = moved, made[sources[0]]
        elif name in _MOVES:  # by sizes or places that are not known here: what it gives is not followed
            continue
        elif name and not (name in _IGNORES and sources == [node.args[0]]):
            unread = sources[1:] if name in _IGNORES and sources[0] is node.args[0] else sources
            yield from ((_line(made[source]), f"is read by {name} at {_line(node)}") for source in unread)


def _name(node: Node) -> str:
    """The name of an operator of ATen; "" for any other node."""
    if not isinstance(node.target, OpOverload) or node.target.namespace not in ("aten", "prims"):
        return ""
    return node.target._schema.name.partition("::")[2]


def _unwritten(node: Node) -> Tensor | None:
    value = node.meta.get("val")
    shape = [] if value is None else [*value.shape]
    if value is None or not all(type(size) is int for size in shape) or not 0 < value.numel() <= _MOST:
        return None
    return torch.zeros(shape, dtype=torch.bool)


def _moved(node: Node, name: str, masks: dict[Any, Any]) -> Any:
    """The mask of the result of an operator that only moves elements; None for any other, or one that is not known."""
    if name in _SAME:
        return masks.get(node.args[0])
    if node.target is operator.getitem:
        source, place = node.args
        return masks[source][place] if isinstance(place, int) and isinstance(masks[source], (list, tuple)) else None
    if name not in _MOVES or not isinstance(node.target, OpOverload):
        return None

    def mask(source: Node) -> Any:
        if source in masks:
            return masks[source]
        value = source.meta.get("val")
        shape = [*value.shape] if isinstance(value, Tensor) else []
        if not isinstance(value, Tensor | int) or not all(type(size) is int for size in shape):
            raise TypeError("a dynamic size, of which a program must not get a guard")
        return torch.ones(shape, dtype=torch.bool) if isinstance(value, Tensor) else value

    try:
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), mask)
        return node.target(*arguments[0], **arguments[1])
    except (RuntimeError, TypeError, NotImplementedError):  # of dynamic sizes
        return None


def _is_whole(mask: Any) -> bool:
    return all(map(_is_whole, mask)) if isinstance(mask, (list, tuple)) else bool(mask.all())


def _line(node: Node) -> str:
    return model_line([node, *node.users])[0] or "an unknown line"
