"""Recognises sums by index that are separable: tensor products of one-dimensional maps, as in `interpolate`'s backward.

The decomposition of `interpolate` reads an image at several indices and adds the values with weights, each of which
depends on the position in one dimension.  Its backward multiplies a gradient by the same weights, adds and subtracts
these products, and adds each by its index.  All of this is one linear map of the gradient.  Written as a sum of tensor
products of one-dimensional maps, it is usually a single tensor product, which needs a fraction of the additions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from ...graph import sizes
from ...graph.nodes import bind
from ...upstream.dispatch import OpOverload
from ...upstream.fake import unset_fake_temporarily
from .evaluated import evaluated
from .index_sums import Sum
from .ranges import Band, band

aten = torch.ops.aten

_DEEP = 24
"""The maximum number of nodes between a gradient and the values of a sum."""
_MANY = 64
"""The maximum number of products in a value."""

Factors = tuple[Node, ...]
"""Weights that are multiplied, in graph order."""
Polynomial = Mapping[Factors, int]
"""A sum of products of weights, with integer coefficients."""
Part = tuple[Node, Factors]
"""A one-dimensional map: the index of the rows, and the weights."""


@dataclass(frozen=True)
class Dimension:
    """The linear map that a separable sum by index applies along one dimension.

    Attributes:
        band: the banded matrix of the map; its weights are computed from the tensors of `nodes`.
        nodes: the nodes of the indices and weights.
    """

    band: Band
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Map:
    """The separable linear map that one or several sums by index apply to a tensor.

    Attributes:
        source: the node of the tensor, [batch..., positions of each dimension, columns...].
        batch: the number of the tensor's leading batch dimensions.
        dimensions: the map of each dimension.
        read: all indices and weights of the sums, including duplicates that compute the same values.
    """

    source: Node
    batch: int
    dimensions: tuple[Dimension, ...]
    read: tuple[Node, ...]


def read_map(puts: Sequence[Sum]) -> Map | None:
    """Returns the linear map that sums by index compute together; None if it is not separable.

    Args:
        puts: sums of equal shape whose results are added.
    """
    source, terms, alike, read = None, Counter[tuple[Part, ...]](), Alike(), list[Node]()
    for put in puts:
        of, polynomial = linear_in(put)
        if source not in (None, of):
            return None
        source = of
        read += [*put.index.tensors, *itertools.chain.from_iterable(polynomial)]
        for parts, number in _parts(put, polynomial, alike).items():
            terms[parts] += number
    vectors = factorized({parts: number for parts, number in terms.items() if number})
    if vectors is None or source is None:
        return None
    shape, batch, lengths = source.meta["val"].shape, puts[0].batch, puts[0].index.lengths
    dimensions = []
    for axis, (vector, length) in enumerate(zip(vectors, lengths, strict=True)):
        found = _dimension(vector, length, sizes.static(shape[batch + axis]))
        if found is None:
            return None
        dimensions.append(found)
    return Map(source, batch, tuple(dimensions), tuple(read))


def linear_in(put: Sum) -> tuple[Node, Polynomial]:
    """Returns (source, weights) such that ``source * weights`` are the values that the sum `put` adds by index.

    The weights are a polynomial: a mapping from products of weight nodes to integer coefficients.  If the values are
    not found to be such a product, the source is the node of the values, and the polynomial is 1.
    """
    return _linear(put.values, put, {}, 0)


def _linear(node: Node, put: Sum, known: dict[Node, tuple[Node, Polynomial]], depth: int) -> tuple[Node, Polynomial]:
    found = known.get(node)
    if found is None:
        found = known[node] = (_product(node, put, known, depth) if depth < _DEEP else None) or (node, {(): 1})
    return found


def _product(
    node: Node, put: Sum, known: dict[Node, tuple[Node, Polynomial]], depth: int
) -> tuple[Node, Polynomial] | None:
    """The source tensor and polynomial of a product, negation, sum or difference; None for other nodes."""
    if node.target not in (aten.mul.Tensor, aten.neg.default, aten.add.Tensor, aten.sub.Tensor):
        return None
    args = bind(node)
    given = [args["self"], *([args["other"]] if "other" in args else [])]
    shape = put.values.meta["val"].shape
    if args.get("alpha", 1) != 1 or any(not isinstance(arg, Node) for arg in given):
        return None
    if node.target is aten.mul.Tensor:
        whole = [arg for arg in given if sizes.same_all(arg.meta["val"].shape, shape)]
        weights = [arg for arg in given if _axis_of(arg, put) is not None]
        if len(whole) != 1 or len(weights) != 1:
            return None
        source, polynomial = _linear(whole[0], put, known, depth + 1)
        return source, {tuple(sorted([*factors, *weights])): number for factors, number in polynomial.items()}
    if any(not sizes.same_all(arg.meta["val"].shape, shape) for arg in given):
        return None
    sources, polynomials = zip(*(_linear(arg, put, known, depth + 1) for arg in given), strict=True)
    if len(set(sources)) != 1:
        return None
    signs = {aten.neg.default: (-1,), aten.sub.Tensor: (1, -1)}.get(node.target, (1, 1))
    total = Counter[Factors]()
    for sign, polynomial in zip(signs, polynomials, strict=True):
        for factors, number in polynomial.items():
            total[factors] += sign * number
    return (sources[0], dict(total)) if len(total) <= _MANY else None


def _axis_of(node: Node, put: Sum) -> int | None:
    """The single position dimension along which a weight tensor varies; else None."""
    value, whole = node.meta["val"], put.values.meta["val"]
    if not isinstance(value, Tensor) or value.dim() > whole.dim() or not value.dtype.is_floating_point:
        return None
    behind = whole.dim() - value.dim()
    differing = [behind + dim for dim, size in enumerate(value.shape) if sizes.static(size) != 1]
    if len(differing) != 1 or not 0 <= differing[0] - put.batch < len(put.index.tensors):
        return None
    axis: int = differing[0] - put.batch
    return axis


def _parts(put: Sum, polynomial: Polynomial, alike: Alike) -> Mapping[tuple[Part, ...], int]:
    """The tensor products of one-dimensional maps whose sum a sum by index is, with their coefficients."""
    indices = [alike.node(index) for index in put.index.tensors]
    found = Counter[tuple[Part, ...]]()
    for factors, number in polynomial.items():
        axes: list[list[Node]] = [[] for _ in indices]
        for factor in factors:
            axis = _axis_of(factor, put)
            assert axis is not None
            axes[axis].append(alike.node(factor))
        found[tuple((index, tuple(sorted(of))) for index, of in zip(indices, axes, strict=True))] += number
    return found


class Alike:
    """Finds nodes that compute the same values, which PyTorch merges later (common subexpression elimination)."""

    def __init__(self) -> None:
        self._first: dict[object, Node] = {}
        self._known: dict[Node, Node] = {}

    def node(self, node: Node) -> Node:
        """Returns the first node, of all that were passed to this method, that computes the same values as `node`."""
        for each in _behind(node, self._known):
            self._known[each] = self._read(each)
        return self._known[node]

    def _read(self, node: Node) -> Node:
        if node.op != "call_function" or node.is_impure() or not isinstance(node.target, OpOverload):
            return node
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return node
        key = node.target, self._key(node.args), self._key(node.kwargs)
        return self._first.setdefault(key, node)

    def _key(self, argument: object) -> object:
        if isinstance(argument, Node):
            return self._known[argument]
        if isinstance(argument, (list, tuple)):
            return tuple(map(self._key, argument))
        if isinstance(argument, dict):
            return tuple((name, self._key(value)) for name, value in argument.items())
        return type(argument), argument


def _behind(node: Node, known: Mapping[Node, Node]) -> list[Node]:
    """The nodes on which a node depends, including itself and without known ones, in graph order."""
    found, waiting = set[Node](), [node]
    while waiting:
        each = waiting.pop()
        if each not in found and each not in known:
            found.add(each)
            waiting += each.all_input_nodes
    return sorted(found)


def factorized(terms: Mapping[tuple[Part, ...], int]) -> list[Mapping[Part, int]] | None:
    """Factorizes a sum of tensor products into a single tensor product; None if that is not possible.

    Args:
        terms: the products, each with one part (one-dimensional map) per dimension, and their coefficients, not 0.

    Returns:
        For each dimension, the parts whose sum is its factor, with their coefficients.
    """
    if not terms:
        return None
    pivot, unit = next(iter(terms.items()))
    if abs(unit) != 1:
        return None
    axes = range(len(pivot))
    vectors = [
        {parts[axis]: number * unit for parts, number in terms.items() if _differ_in(parts, pivot) <= {axis}}
        for axis in axes
    ]
    products = {
        tuple(part for part, _ in chosen): unit * math.prod(number for _, number in chosen)
        for chosen in itertools.product(*(vector.items() for vector in vectors))
    }
    if products != dict(terms):
        return None
    vectors[0] = {part: unit * number for part, number in vectors[0].items()}
    return list(vectors)


def _differ_in(one: tuple[Part, ...], other: tuple[Part, ...]) -> set[int]:
    return {axis for axis, (a, b) in enumerate(zip(one, other, strict=True)) if a != b}


def _dimension(parts: Mapping[Part, int], rows: object, positions: int | None) -> Dimension | None:
    """The map of one dimension; None if its indices do not depend on positions alone."""
    if not isinstance(rows, int) or not positions:
        return None
    nodes = tuple(dict.fromkeys(node for index, factors in parts for node in (index, *factors)))
    with unset_fake_temporarily():
        first = torch.full((positions,), rows, dtype=torch.int64, device="cpu")
        last = torch.full((positions,), -1, dtype=torch.int64, device="cpu")
        for index in dict.fromkeys(index for index, _ in parts):
            bounds = evaluated(index)
            if bounds is None or bounds[0].numel() != positions:
                return None
            low, high = (bound.reshape(-1).long() for bound in bounds)
            if int(low.min()) < 0 or int(high.max()) >= rows:
                return None
            products = [factors for of, factors in parts if of is index]
            nothing = functools.reduce(torch.logical_and, (_vanish(factors, positions) for factors in products))
            first = torch.where(nothing, first, torch.minimum(first, low))
            last = torch.where(nothing, last, torch.maximum(last, high))
        place = {node: i for i, node in enumerate(nodes)}
        numbered = [(place[of], tuple(place[factor] for factor in factors), n) for (of, factors), n in parts.items()]
        found = band(first, last, rows, functools.partial(_matrix, rows=rows, parts=numbered))
    return Dimension(found, nodes) if found.fits else None


def _vanish(factors: Factors, positions: int) -> Tensor:
    """Whether a product of weights is certainly 0 at each position, bool [positions]."""
    found = torch.zeros(positions, dtype=torch.bool, device="cpu")
    for factor in factors:
        bounds = evaluated(factor)
        if bounds is not None:
            found = found | ((bounds[0] == 0) & (bounds[1] == 0)).reshape(-1)
    return found


def _matrix(*tensors: Tensor, rows: int, parts: Sequence[tuple[int, Sequence[int], int]], dtype: torch.dtype) -> Tensor:
    """The matrix of weights of a dimension, [rows, positions]."""
    numbers, terms = torch.arange(rows, device=tensors[0].device)[:, None], []
    for index, factors, number in parts:
        weights = (tensors[i].reshape(1, -1).to(dtype) for i in factors)
        value = functools.reduce(torch.mul, weights, torch.full((1, 1), number, dtype=dtype, device=numbers.device))
        terms.append(torch.where(tensors[index].reshape(1, -1) == numbers, value, 0))
    return functools.reduce(torch.add, terms)


def together(puts: Mapping[Node, Sum]) -> list[list[Node]]:
    """Groups nodes, each a sum by index, that add up to one result and have the same source tensor and shape.

    Args:
        puts: the nodes, with the sums that they compute.  Other tensors may be added to the results, too.
    """
    groups: dict[object, list[Node]] = {}
    for node, put in puts.items():
        total = node
        while (adding := adds_up(total)) is not None:
            total = adding
        groups.setdefault((total, linear_in(put)[0], put.batch, put.index.lengths), []).append(node)
    return list(groups.values())


def adds_up(node: Node) -> Node | None:
    """Returns the only reader of a node, if it adds another tensor of the same shape and dtype to it; else None."""
    (user,) = node.users if len(node.users) == 1 else (None,)
    if user is None or user.target is not aten.add.Tensor or user.kwargs or len(user.all_input_nodes) != 2:
        return None
    values = [arg.meta["val"] for arg in user.all_input_nodes]
    same = values[0].dtype == values[1].dtype and sizes.same_all(values[0].shape, values[1].shape)
    return user if same else None
