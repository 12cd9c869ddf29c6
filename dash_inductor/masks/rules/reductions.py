"""Rules of the mask reader for running sums and reductions of elements that are all equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..index_expr import Branch, NotRecognised, Value
from ..nodes import Position, meta_of, shape_of
from ..reader import MaskReader, Rule
from .elementwise import convert, number

RULES: dict[str, Rule] = {}


def _same_along(reader: MaskReader, node: Node, source: Node, dims: set[int], position: Position) -> Value:
    """Return the element that `source` has at every index along `dims`; `position` has the other dimensions.

    Raises:
        NotRecognised: the elements differ, or there may be none.
    """
    shape, others = shape_of(source), iter(position)
    places = tuple(
        reader.algebra.index(f"{node.name}_{d}", n) if d in dims else next(others) for d, n in enumerate(shape)
    )
    if not all(reader.algebra.nonnegative(shape[d] - 1) for d in dims):
        raise NotRecognised("not_a_band", f"{node.name} reduces {list(shape)}, which may be empty")
    value = reader.load(source, places)
    if _symbols(value) & {places[d] for d in dims}:
        raise NotRecognised("unknown_op", f"{node.target} ({node.name}) of elements that are not all the same")
    return value


def _symbols(value: Value) -> set[Any]:
    if isinstance(value, Branch):
        return set(value.cond.free_symbols) | _symbols(value.then) | _symbols(value.other)
    return set() if isinstance(value, bool) else set(value.free_symbols)


def _times(reader: MaskReader, value: Value, count: sympy.Expr, node: Node) -> Value:
    """Return the sum of `count` equal elements, each of which is converted before it is added."""

    def leaf(x: Any) -> Value:
        if not number(x).is_integer:
            raise NotRecognised("not_a_band", f"{node.name} adds values like {x}, which are no integers")
        return sympy.expand(number(x) * count)

    if meta_of(node).dtype == torch.bool:
        return convert(reader, value, node)
    return convert(reader, reader.algebra.lift(leaf, convert(reader, value, node)), node)


def _cumsum(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    if not position:
        return convert(reader, reader.load(args["self"], ()), node)
    dim = args["dim"] % len(position)
    row = _same_along(reader, node, args["self"], {dim}, position[:dim] + position[dim + 1 :])
    return _times(reader, row, position[dim] + 1, node)


def _reduced(combine: Callable[[MaskReader, Value, sympy.Expr, Node], Value]) -> Rule:
    def rule(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
        shape, given = shape_of(args["self"]), args.get("dim")
        chosen = range(len(shape)) if given is None or given == [] else [given] if isinstance(given, int) else given
        dims = {d % len(shape) for d in chosen} if shape else set()
        if args.get("keepdim"):
            position = tuple(i for d, i in enumerate(position) if d not in dims)
        value = _same_along(reader, node, args["self"], dims, position)
        return combine(reader, value, sympy.Mul(*(shape[d] for d in dims)), node)

    return rule


def _itself(reader: MaskReader, value: Value, count: sympy.Expr, node: Node) -> Value:
    del count
    if "am" not in str(node.target) and meta_of(node).dtype != torch.bool:
        raise NotRecognised("unknown_op", f"{node.target} ({node.name}) with a result of type {meta_of(node).dtype}")
    return convert(reader, value, node)


RULES["aten::cumsum"] = _cumsum
RULES["aten::sum"] = _reduced(_times)
RULES.update((f"aten::{name}", _reduced(_itself)) for name in ["any", "all", "amax", "amin"])
