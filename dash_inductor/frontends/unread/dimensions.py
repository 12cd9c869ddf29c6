"""Labels for the dimensions of tensors: the products' dimensions from which they come, followed through views."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Node

from ...graph.nodes import bind, op_name
from .products import number_of, shape_of

Label = tuple[Node, int]
"""A dimension of a product's result that only one of its operands has: (product, dimension)."""
Labels = frozenset[Label]
Dim = tuple[tuple[int, Labels], ...]
"""The parts of a dimension that merges several, each with its size and labels; empty for a dimension of size 1."""
Dims = tuple[Dim, ...]

NO_LABELS: Labels = frozenset()
_MOST = 16
"""The maximum number of labels of one part of a dimension."""


def labels_of(dims: Sequence[Dim]) -> Labels:
    """Return the union of the dimensions' labels: the dimensions of products from which these dimensions come."""
    return NO_LABELS.union(*(labels for dim in dims for _, labels in dim))


def relabelled(dim: Dim, labels: Labels) -> Dim:
    """Return a dimension with `labels` added to each of its parts."""
    return tuple((size, _latest(own | labels)) for size, own in dim)


def _latest(labels: Labels) -> Labels:
    """Return the labels of the latest products, at most `_MOST`; residual sums would collect those of all layers."""
    if len(labels) <= _MOST:
        return labels
    return frozenset(sorted(labels)[-_MOST:])


def only(dim: Dim, labels: Labels) -> Dim:
    """Return a dimension that keeps, of its labels, those in `labels`."""
    return tuple((size, own & labels) for size, own in dim)


def plain_dims(node: Node, known: dict[Any, int]) -> Dims:
    """Return the dimensions of a node's tensor, without labels; `known` is that of `number_of`."""
    found = (number_of(size, known) for size in shape_of(node))
    return tuple(() if size == 1 else ((size, NO_LABELS),) for size in found)


def broadcast(rank: int, operands: Sequence[Dims]) -> Dims:
    """Return the dimensions, with all labels, of an elementwise result of tensors that broadcast.

    Args:
        rank: the number of dimensions of the result.
        operands: the dimensions of the tensors.
    """
    found: list[Dim] = [()] * rank
    for dims in operands:
        for place, dim in enumerate(dims, rank - len(dims)):
            found[place] = _joined(found[place], dim)
    return tuple(found)


def _joined(one: Dim, other: Dim) -> Dim:
    if not one or not other or one == other:
        return one or other
    if [size for size, _ in one] == [size for size, _ in other]:
        return tuple((size, _latest(a | b)) for (size, a), (_, b) in zip(one, other, strict=True))
    fine, coarse = (one, other) if len(one) >= len(other) else (other, one)
    return relabelled(fine, labels_of([coarse]))


def viewed_as(dims: Dims, sizes: Sequence[int]) -> Dims:
    """Return the labelled dimensions of a view of a tensor.

    Args:
        dims: the labelled dimensions of the tensor.
        sizes: the shape of the view; if it has no elements or does not split or merge dimensions evenly, each dimension
            gets all labels.
    """
    if 0 in sizes:
        return _in_all(dims, sizes)
    parts = [part for dim in dims for part in dim]
    found: list[Dim] = []
    for size in sizes:
        dim: list[tuple[int, Labels]] = []
        left = size
        while left != 1:
            if not parts:
                return _in_all(dims, sizes)
            (whole, labels), parts = parts[0], parts[1:]
            if left % whole == 0:
                dim.append((whole, labels))
                left //= whole
            elif whole % left == 0:
                dim.append((left, labels))
                parts.insert(0, (whole // left, labels))
                left = 1
            else:
                return _in_all(dims, sizes)
        found.append(tuple(dim))
    return tuple(found) if not parts else _in_all(dims, sizes)


def _in_all(dims: Dims, sizes: Sequence[int]) -> Dims:
    labels = labels_of(dims)
    return tuple(() if size == 1 else ((size, labels),) for size in sizes)


def through(node: Node, dims: Dims, known: dict[Any, int]) -> Dims | None:
    """Return the dimensions of a node that views, copies or selects from a tensor with `dims`; None for other nodes."""
    rule = _RULES.get(op_name(node))
    return None if rule is None else rule(node, dims, known)


def _view(node: Node, dims: Dims, known: dict[Any, int]) -> Dims:
    sizes = [number_of(size, known) for size in shape_of(node)]
    if math.prod(sizes) != math.prod(size for dim in dims for size, _ in dim):
        return _in_all(dims, sizes)
    return viewed_as(dims, sizes)


def _permute(node: Node, dims: Dims, known: dict[Any, int]) -> Dims:
    order: Any = node.args[1]
    return tuple(dims[dim] for dim in order)


def _transpose(node: Node, dims: Dims, known: dict[Any, int]) -> Dims:
    one, other = (node.args[1:3] if len(node.args) > 2 else (-1, -2))[:2]
    found = list(dims)
    found[one], found[other] = dims[other], dims[one]  # type: ignore[index]  # they are numbers
    return tuple(found)


def _unsqueeze(node: Node, dims: Dims, known: dict[Any, int]) -> Dims:
    place: Any = node.args[1]
    found = list(dims)
    found.insert(place % (len(dims) + 1), ())
    return tuple(found)


def _squeeze(node: Node, dims: Dims, known: dict[Any, int]) -> Dims:
    asked: Any = node.args[1] if len(node.args) > 1 else range(len(dims))
    gone = {dim % len(dims) for dim in ([asked] if isinstance(asked, int) else asked)}
    return tuple(dim for place, dim in enumerate(dims) if place not in gone or dim)


def _expand(node: Node, dims: Dims, known: dict[Any, int]) -> Dims:
    own = plain_dims(node, known)
    return tuple(
        dim or wide for dim, wide in zip(((),) * (len(own) - len(dims)) + dims, own, strict=True)
    )  # new dimensions have no labels


def cut(node: Node, dims: Dims, known: dict[Any, int]) -> Dims:
    """Return the dimensions of a slice, a padded tensor or another selection of a tensor with `dims`.

    Dimensions keep their labels; those whose size changes count as one part.
    """
    own = plain_dims(node, known)
    return tuple(
        dim if _sized(dim) == _sized(wide) else relabelled(wide, labels_of([dim]))
        for dim, wide in zip(dims, own, strict=True)
    )


def _sized(dim: Dim) -> int:
    return math.prod(size for size, _ in dim)


def _select(node: Node, dims: Dims, known: dict[Any, int]) -> Dims:
    place: Any = bind(node)["dim"]
    return tuple(dim for number, dim in enumerate(dims) if number != place % len(dims))


def _same(node: Node, dims: Dims, known: dict[Any, int]) -> Dims:
    return dims


_RULES: Mapping[str, Callable[[Node, Dims, dict[Any, int]], Dims]] = {
    "aten::permute": _permute,
    "aten::transpose": _transpose,
    "aten::t": _transpose,
    "aten::unsqueeze": _unsqueeze,
    "aten::squeeze": _squeeze,
    "aten::expand": _expand,
    "aten::select": _select,
    **dict.fromkeys(("aten::slice", "aten::constant_pad_nd", "aten::index_select", "aten::narrow"), cut),
    **dict.fromkeys(("aten::view", "aten::_unsafe_view", "aten::reshape"), _view),
    **dict.fromkeys(
        ("aten::clone", "aten::alias", "aten::detach", "aten::contiguous", "aten::flip", "aten::roll"), _same
    ),
}
