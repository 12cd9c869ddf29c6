"""Labels for the dimensions of tensors by what they index, followed through views and permutations in both directions.

An `Atom` is a range of indices, such as the heads.  A dimension is labelled by the atoms that it merges, slowest first;
a dimension of size 1 has an empty label.  If a view splits an atom, its parts replace it in all labels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from ...graph.nodes import op_name
from ...graph.sizes import Dim, same, same_all, static

VIEWS = ("aten::view", "aten::_unsafe_view", "aten::reshape", "aten::unsqueeze", "aten::squeeze")
COPIES = ("aten::clone", "aten::alias", "aten::detach", "aten::contiguous")
CAST = "prims::convert_element_type"


@dataclass(frozen=True, eq=False)
class Atom:
    """A range of indices, and the (node, dimension) pairs where one dimension of a tensor is exactly this range."""

    size: Dim
    places: list[tuple[Node, int]] = field(default_factory=list, repr=False)


Dimension = tuple[Atom, ...]
Labels = tuple[Dimension, ...]


def shape_of(node: Node) -> Sequence[Dim]:
    """Return the shape of a node's tensor; () for other values."""
    value = node.meta.get("val")
    return value.shape if isinstance(value, Tensor) else ()


def broadcast(node: Node, labels: Labels) -> Labels:
    """Return the labels of the tensor of `node`, which broadcasts to a tensor with `labels`.

    A label is a tuple of the atoms (index ranges) that a dimension merges; dimensions of size 1 have ().
    """
    shape = shape_of(node)
    padded: Labels = ((),) * len(shape) if len(shape) > len(labels) else labels[len(labels) - len(shape) :]
    return tuple(() if static(size) == 1 else label for size, label in zip(shape, padded, strict=True))


def is_tensor(value: object) -> bool:
    """Return whether a value is a node with a tensor."""
    return isinstance(value, Node) and isinstance(value.meta.get("val"), Tensor)


def is_float(value: object) -> bool:
    """Return whether a value is a node with a floating-point tensor."""
    return isinstance(value, Node) and is_tensor(value) and value.meta["val"].dtype.is_floating_point


def shows_bits(node: Node) -> bool:
    """Return whether a node reinterprets the bits of a tensor as another dtype, as ``x.view(torch.float16)`` does."""
    return node.target is torch.ops.aten.view.dtype


class Atoms:
    """The atoms (index ranges, such as the heads) of one attention, and the parts into which views split them."""

    def __init__(self) -> None:
        self._parts: dict[Atom, Dimension] = {}

    def whole(self, node: Node) -> Labels:
        """Return labels for a tensor whose dimensions are unrelated to any seen before: each gets one new `Atom`.

        An atom is an elementary index range, such as the heads; views may split it later.  Dimensions of size 1
        get none.
        """
        return self._noted(node, [() if static(n) == 1 else (Atom(n),) for n in shape_of(node)])

    def atoms(self, dimension: Iterable[Atom]) -> Dimension:
        """Return these atoms, each replaced by its parts if a view has split it."""
        found: list[Atom] = []
        for atom in dimension:
            found += self.atoms(self._parts[atom]) if atom in self._parts else (atom,)
        return tuple(found)

    def resolved(self, labels: Labels) -> Labels:
        """Return `labels` with every atom (index range) that a view has split replaced by its parts."""
        return tuple(map(self.atoms, labels))

    def same(self, a: Labels, b: Labels) -> bool:
        """Return whether tensors with labels `a` and `b` have equal dimensions, apart from leading ones of size 1."""
        a, b = self.resolved(a), self.resolved(b)
        width = max(len(a), len(b))
        return (((),) * (width - len(a)) + a) == (((),) * (width - len(b)) + b)

    def through(self, node: Node, labels: Labels) -> Labels | None:
        """Return the labels of a node's dimensions, given those of its first argument.

        A label lists the atoms that a dimension merges.  Return None if the node is not a view, cast or copy of its
        first argument.

        Args:
            node: the node.
            labels: the labels of its first argument.
        """
        source, name = node.args[0], op_name(node)
        if not isinstance(source, Node) or not is_tensor(source) or not is_tensor(node):
            return None
        if shows_bits(node) or len(labels) != len(shape_of(source)):
            return None
        if name in VIEWS:
            return self._viewed(labels, node)
        if name in COPIES or (name == "aten::expand" and same_all(shape_of(source), shape_of(node))):
            return labels
        if name == CAST and is_float(source) and is_float(node):
            return labels
        order = permutation(node)
        return None if order is None else tuple(labels[dim] for dim in order)

    def back(self, node: Node, labels: Labels) -> Labels | None:
        """Return the labels of the dimensions of a node's first argument, given those of the node.

        A label lists the atoms that a dimension merges.  Return None if the node is not a view, cast or copy of its
        first argument.

        Args:
            node: the node.
            labels: the labels of the node.
        """
        source, name = node.args[0] if node.args else None, op_name(node)
        if not isinstance(source, Node) or not is_tensor(source) or shows_bits(node):
            return None
        if name in VIEWS:
            return self._viewed(labels, source)
        order = permutation(node)
        if order is not None:
            return tuple(labels[order.index(dim)] for dim in range(len(order)))
        return labels if self.through(node, labels) is not None else None

    def _viewed(self, labels: Labels, node: Node) -> Labels | None:
        """Return the labels of a node that is a view, with its elements in order, of a tensor with `labels`.

        Return None if unknown.
        """
        shape = shape_of(node)
        old = [atom for dimension in self.resolved(labels) for atom in dimension]
        new = [dim for dim, size in enumerate(shape) if static(size) != 1]
        found: list[Dimension] = [()] * len(shape)
        while old or new:
            taken = self._group([atom.size for atom in old], [shape[dim] for dim in new])
            if taken is None:
                return None
            atoms, dims = old[: taken[0]], new[: taken[1]]
            old, new = old[taken[0] :], new[taken[1] :]
            if len(dims) == 1:
                found[dims[0]] = tuple(atoms)
            else:
                parts = tuple(Atom(shape[dim]) for dim in dims)
                self._parts[atoms[0]] = parts
                for dim, part in zip(dims, parts, strict=True):
                    found[dim] = (part,)
        return self._noted(node, found)

    @staticmethod
    def _group(old: Sequence[Dim], new: Sequence[Dim]) -> tuple[int, int] | None:
        """Return the lengths of the shortest prefixes of both with the same product, one of them of length 1."""
        pairs = [*((i, 1) for i in range(1, len(old) + 1)), *((1, j) for j in range(2, len(new) + 1))]
        for i, j in sorted(pairs, key=sum):
            if i <= len(old) and j <= len(new) and same(math.prod(old[:i]), math.prod(new[:j])):
                return i, j
        return None

    @staticmethod
    def _noted(node: Node, labels: Sequence[Dimension]) -> Labels:
        for dim, dimension in enumerate(labels):
            if len(dimension) == 1:
                dimension[0].places.append((node, dim))
        return tuple(labels)


def permutation(node: Node) -> tuple[int, ...] | None:
    """Return the permutation by which a node reorders the dimensions of its first argument; None for other nodes.

    Dimension i of the node is dimension ``result[i]`` of its first argument.
    """
    name = op_name(node)
    if name == "aten::permute":
        dims = node.args[1]
        assert isinstance(dims, (list, tuple))
        return tuple(int(dim) % len(dims) for dim in dims if isinstance(dim, int))
    if name in ("aten::transpose", "aten::t"):
        order = list(range(len(shape_of(node))))
        a, b = node.args[1:] if name == "aten::transpose" else (0, 1)
        assert isinstance(a, int)
        assert isinstance(b, int)
        order[a], order[b] = order[b], order[a]
        return tuple(order)
    return None


def strides(atoms: Atoms, labels: Labels, value: Tensor) -> dict[Atom, Dim]:
    """Return the stride, in elements, of each atom (an index range such as the heads) in the dimensions of a tensor.

    Args:
        atoms: the atoms of the graph, by which labels are resolved.
        labels: the labels of the tensor's dimensions.
        value: the tensor.
    """
    found: dict[Atom, Dim] = {}
    for dimension, stride in zip(atoms.resolved(labels), value.stride(), strict=True):
        inner: Dim = stride
        for atom in reversed(dimension):
            found[atom] = inner
            inner = inner * atom.size
    return found


def stride_of(role: Dimension, of_atoms: dict[Atom, Dim]) -> Dim | None:
    """Return the stride, in elements, of the dimension that merges the atoms `role`; 1 if there are none.

    Return None if the atoms are not one dimension in memory.

    Args:
        role: the atoms (index ranges), slowest first.
        of_atoms: the stride of each atom, from `strides`.
    """
    if any(atom not in of_atoms for atom in role):
        return None
    for outer, inner in itertools.pairwise(role):
        if not same(of_atoms[outer], of_atoms[inner] * inner.size):
            return None
    return of_atoms[role[-1]] if role else 1
