"""Products of two tensors, whichever operators compute them: which dimensions they keep, and which they contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from ...graph import sizes
from ...graph.nodes import bind, op_name

Pair = tuple[int | None, int | None]
"""A dimension of the left and of the right operand; None if the operand lacks it or has size 1 there."""


@dataclass(frozen=True)
class Product:
    """A product of two tensors: a matrix product, or a sum or an elementwise product that amounts to one.

    Attributes:
        operands: left and right.
        kept: for each dimension of the result, the dimensions of the operands from which it comes.
        contracted: the pairs of dimensions that are summed over.
    """

    operands: tuple[Node, Node]
    kept: tuple[Pair, ...]
    contracted: tuple[Pair, ...]

    def free(self) -> Iterator[int]:
        """Yield the dimensions of the result that only one operand has, such as the rows of a matrix product."""
        return (dim for dim, pair in enumerate(self.kept) if (pair[0] is None) != (pair[1] is None))


def shape_of(node: object) -> Sequence[sizes.Dim]:
    """Return the shape of a node's tensor; () for anything else."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.shape if isinstance(value, Tensor) else ()


def product_of(node: Node) -> Product | None:
    """Return the product that a node computes; None if it computes none."""
    read = _READERS.get(op_name(node))
    return None if read is None else read(node)


def _matmul(place: int = 0) -> Callable[[Node], Product | None]:
    """Return a reader of products of matrices, vectors, or batches of matrices.

    Args:
        place: the index of the left operand among the node's arguments.
    """

    def read(node: Node) -> Product | None:
        left, right = node.args[place], node.args[place + 1]
        if not isinstance(left, Node) or not isinstance(right, Node):
            return None
        a, b = len(shape_of(left)), len(shape_of(right))
        if not a or not b:
            return None
        lead = "abcdefghij"[: max(a, b, 2) - 2]  # batch dimensions, right-aligned
        of_left = lead[len(lead) - a + 2 :] + "mk" if a > 1 else "k"
        of_right = lead[len(lead) - b + 2 :] + "kn" if b > 1 else "k"
        kept = lead + "m" * (a > 1) + "n" * (b > 1)
        return _by_letters((left, right), (of_left, of_right), kept)

    return read


def _einsum(node: Node) -> Product | None:
    equation, operands = node.args[0], node.args[1]
    if not isinstance(operands, (list, tuple)) or len(operands) != 2 or "." in str(equation):
        return None
    given, _, kept = str(equation).replace(" ", "").partition("->")
    left, right = given.split(",")
    one, other = operands
    if not isinstance(one, Node) or not isinstance(other, Node) or "->" not in str(equation):
        return None
    return _by_letters((one, other), (left, right), kept)


def _by_letters(operands: tuple[Node, Node], names: tuple[str, str], kept: str) -> Product:
    """Return the product whose operands have dimensions named as in einsum."""

    def pair(name: str) -> Pair:
        left, right = (
            None if dim < 0 or sizes.static(shape_of(operand)[dim]) == 1 else dim
            for operand, dim in zip(operands, (own.find(name) for own in names), strict=True)
        )
        return left, right

    contracted = [name for name in dict.fromkeys(names[0] + names[1]) if name not in kept]
    return Product(operands, tuple(map(pair, kept)), tuple(map(pair, contracted)))


def _summed(node: Node) -> Product | None:
    """Return a sum of an elementwise product as a product.

    It contracts summed dimensions.  Return None unless both factors have one of them.
    """
    args = bind(node)
    source, dims = args["self"], args.get("dim")
    while isinstance(source, Node) and op_name(source) in _CASTS:
        source = source.args[0]
    if not isinstance(source, Node) or op_name(source) != "aten::mul" or not dims:
        return None
    whole = _outer(source, any_shape=True)
    if whole is None:
        return None
    rank = len(whole.kept)
    summed = {dim % rank for dim in dims}
    contracted = tuple(pair for dim, pair in enumerate(whole.kept) if dim in summed)
    if not any(None not in pair for pair in contracted):
        return None
    kept = tuple(
        (None, None) if dim in summed else pair
        for dim, pair in enumerate(whole.kept)
        if dim not in summed or args.get("keepdim")
    )
    return Product(whole.operands, kept, contracted)


def _outer(node: Node, *, any_shape: bool = False) -> Product | None:
    """Return an elementwise product as a product if each factor broadcasts along a dimension that the other one has."""
    factors = [arg for arg in node.args if isinstance(arg, Node) and shape_of(arg)]
    if len(factors) != 2 or len(node.args) != 2:
        return None
    rank = len(shape_of(node))
    own: list[list[int | None]] = []
    for factor in factors:
        shape = shape_of(factor)
        missing = rank - len(shape)
        own.append([None if dim < 0 or sizes.static(shape[dim]) == 1 else dim for dim in range(-missing, len(shape))])
    kept = tuple(zip(*own, strict=True))
    alone = {pair[0] is None for pair in kept if (pair[0] is None) != (pair[1] is None)}
    if not any_shape and alone != {True, False}:
        return None
    return Product((factors[0], factors[1]), kept, ())


_CASTS = ("prims::convert_element_type", "aten::_to_copy")
_READERS: Mapping[str, Callable[[Node], Product | None]] = {
    "aten::mm": _matmul(),
    "aten::bmm": _matmul(),
    "aten::mv": _matmul(),
    "aten::matmul": _matmul(),
    "aten::addmm": _matmul(1),
    "aten::baddbmm": _matmul(1),
    "aten::einsum": _einsum,
    "aten::sum": _summed,
    "aten::mul": _outer,
}


def number_of(size: Any, known: dict[Any, int]) -> int:
    """Return an integer that stands for a size, so that products of symbolic sizes can be compared.

    A static size stands for itself.  In a symbolic one, each symbol is replaced by a prime.

    Args:
        size: the size, static or symbolic.
        known: the numbers chosen so far for symbols and expressions; extended.
    """
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if expression not in known:
        for symbol in expression.free_symbols - known.keys():
            known[symbol] = _PRIMES[sum(key.is_symbol for key in known) % len(_PRIMES)]
        found = expression.subs({symbol: known[symbol] for symbol in expression.free_symbols})
        known[expression] = int(found) if found.is_integer else 1
    return known[expression]


_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069, 1087, 1091, 1093, 1097)
