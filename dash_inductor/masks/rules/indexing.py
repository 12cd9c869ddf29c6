"""Rules of the mask reader for creation and data movement: which element of its input an element comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..index_expr import NotRecognised, Value
from ..nodes import Position, as_expr, meta_of, shape_of
from ..reader import MaskReader, Rule
from .elementwise import convert

RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update((f"aten::{name}", rule) for name in names)
        return rule

    return add


# Creation


@_rule("arange")
def _arange(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    start, step = as_expr(args.get("start", 0)), as_expr(args.get("step", 1))
    if not (start.is_integer and step.is_integer):
        raise NotRecognised("not_a_band", f"{node.name} starts at {start} with steps of {step}: not integers")
    return convert(reader, sympy.expand(start + step * position[0]), node)


RULES["prims::iota"] = _arange


def _filled(argument: str | None, constant: int = 0) -> Rule:
    def rule(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
        value = as_expr(args[argument]) if argument else sympy.Integer(constant)
        return convert(reader, value, node)

    return rule


_rule("full", "full_like", "new_full")(_filled("fill_value"))
_rule("ones", "ones_like", "new_ones")(_filled(None, 1))
_rule("zeros", "zeros_like", "new_zeros")(_filled(None, 0))
_rule("scalar_tensor")(_filled("s"))


# Movement without arithmetic on values


@_rule("unsqueeze")
def _unsqueeze(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    dim = args["dim"] % len(position)
    return reader.load(args["self"], position[:dim] + position[dim + 1 :])


@_rule("squeeze")
def _squeeze(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    shape, dims = shape_of(args["self"]), args.get("dim")
    chosen = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % len(shape) for d in chosen if shape[d] == 1}
    kept = iter(position)
    return reader.load(args["self"], tuple(sympy.S.Zero if d in gone else next(kept) for d in range(len(shape))))


@_rule("expand")
def _expand(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    return reader.operand(args["self"], position)


@_rule("repeat")
def _repeat(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    shape = shape_of(args["self"])
    times = [as_expr(n) for n in args["repeats"]][len(position) - len(shape) :]
    inner = zip(position[len(position) - len(shape) :], shape, times, strict=True)
    return reader.load(args["self"], tuple(i if k == 1 else reader.algebra.floor_divide(i, n)[1] for i, n, k in inner))


@_rule("permute", "transpose", "t")
def _permute(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    order = list(range(len(position)))
    if "dims" in args:
        order = [d % len(order) for d in args["dims"]]
    elif order[1:]:
        a, b = args.get("dim0", 0), args.get("dim1", 1)
        order[a], order[b] = order[b], order[a]
    source = dict(zip(order, position, strict=True))
    return reader.load(args["self"], tuple(source[d] for d in range(len(position))))


@_rule("view", "_unsafe_view")
def _view(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    if "dtype" in args:
        raise NotRecognised("unknown_op", f"{node.name} reads the same bits as another type")
    before, after = shape_of(args["self"]), shape_of(node)
    kept = [(n, i) for n, i in zip(after, position, strict=True) if n != 1]
    if [n for n in before if n != 1] == [n for n, _ in kept]:
        source = iter(i for _, i in kept)
        return reader.load(args["self"], tuple(sympy.S.Zero if n == 1 else next(source) for n in before))
    flat = sympy.S.Zero
    for n, i in zip(after, position, strict=True):
        flat = sympy.expand(flat * n + i)
    source_position: list[sympy.Expr] = []
    for n in reversed(before[1:]):
        flat, rest = reader.algebra.floor_divide(flat, n)
        source_position.insert(0, rest)
    return reader.load(args["self"], (flat, *source_position) if before else ())


@_rule("slice")
def _slice(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    dim = args["dim"] % len(position)
    start = _from_start(reader, args.get("start"), shape_of(args["self"])[dim])
    at = sympy.expand(start + position[dim] * as_expr(args.get("step", 1)))
    return reader.load(args["self"], (*position[:dim], at, *position[dim + 1 :]))


@_rule("unfold")
def _unfold(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    """Return an element of a sliding window along a dimension: the last index is the offset within the window."""
    *outer, within = position
    if not outer:
        return reader.load(args["self"], ())
    dim = args["dimension"] % len(outer)
    outer[dim] = sympy.expand(outer[dim] * as_expr(args["step"]) + within)
    return reader.load(args["self"], tuple(outer))


@_rule("select")
def _select(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    shape = shape_of(args["self"])
    dim = args["dim"] % len(shape)
    at = _from_start(reader, args["index"], shape[dim])
    return reader.load(args["self"], (*position[:dim], at, *position[dim:]))


def _from_start(reader: MaskReader, index: Any, extent: sympy.Expr) -> sympy.Expr:
    """Return an index or slice start, counted from the start of the dimension.

    A slice that starts beyond the end has no elements, so that nothing is read.
    """
    at = as_expr(0 if index is None else index)
    proved = reader.algebra.nonnegative
    if proved(at):
        return at
    if proved(-at - 1) and proved(extent + at):
        return sympy.expand(extent + at)
    if proved(-at - extent):
        return sympy.S.Zero
    raise NotRecognised("not_a_band", f"index {at} of {extent} is not proved to be on one side of 0")


@_rule("flip")
def _flip(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    shape = shape_of(node)
    dims = {d % len(shape) for d in args["dims"]}
    source = args["a" if "a" in args else "self"]
    return reader.load(source, tuple(shape[d] - 1 - i if d in dims else i for d, i in enumerate(position)))


RULES["prims::rev"] = _flip


# Joining and filling by position


@_rule("cat")
def _cat(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    dim = args.get("dim", 0) % len(position)
    parts = [t for t in args["tensors"] if shape_of(t)[dim if len(shape_of(t)) > 1 else 0] != 0]

    def read(parts: list[Node], at: sympy.Expr) -> Value:
        def first() -> Value:
            return convert(reader, reader.load(parts[0], (*position[:dim], at, *position[dim + 1 :])), node)

        if len(parts) == 1:
            return first()
        extent = shape_of(parts[0])[dim]
        inside = reader.algebra.at_least_zero(sympy.expand(extent - 1 - at))
        return reader.choose(inside, first, lambda: read(parts[1:], sympy.expand(at - extent)))

    return read(parts, position[dim])


def _within(reader: MaskReader, at: sympy.Expr, extent: sympy.Expr) -> Value:
    algebra = reader.algebra
    return algebra.choose(algebra.at_least_zero(at), algebra.at_least_zero(sympy.expand(extent - 1 - at)), False)


@_rule("constant_pad_nd")
def _pad(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    source, shape = list(position), shape_of(args["self"])
    inside: Value = True
    for k, left in enumerate(args["pad"][::2]):
        dim = len(position) - 1 - k
        source[dim] = sympy.expand(position[dim] - as_expr(left))
        inside = reader.algebra.choose(inside, _within(reader, source[dim], shape[dim]), False)
    return reader.choose(
        inside,
        lambda: reader.load(args["self"], tuple(source)),
        lambda: convert(reader, as_expr(args.get("value", 0)), node),
    )


@_rule("slice_scatter")
def _slice_scatter(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    if args.get("step", 1) != 1:
        raise NotRecognised("unknown_op", f"slice_scatter with a step ({node.name})")
    dim = args["dim"] % len(position)
    at = sympy.expand(position[dim] - _from_start(reader, args.get("start"), shape_of(node)[dim]))
    return reader.choose(
        _within(reader, at, shape_of(args["src"])[dim]),
        lambda: convert(reader, reader.load(args["src"], (*position[:dim], at, *position[dim + 1 :])), node),
        lambda: reader.load(args["self"], position),
    )


@_rule("select_scatter")
def _select_scatter(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    dim = args["dim"] % len(position)
    at = _from_start(reader, args["index"], shape_of(node)[dim])
    return reader.choose(
        reader.algebra.equal_zero(sympy.expand(position[dim] - at)),
        lambda: convert(reader, reader.load(args["src"], position[:dim] + position[dim + 1 :]), node),
        lambda: reader.load(args["self"], position),
    )


def _triangle(sign: int) -> Rule:
    def rule(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
        above = position[-1] - position[-2] - as_expr(args.get("diagonal", 0))
        return reader.choose(
            reader.algebra.at_least_zero(sympy.expand(sign * above)),
            lambda: reader.load(args["self"], position),
            lambda: convert(reader, sympy.S.Zero, node),
        )

    return rule


_rule("triu")(_triangle(1))
_rule("tril")(_triangle(-1))


# Positions that are values


@_rule("index")
def _index(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    source, indices = args["self"], list(args["indices"])
    shape = shape_of(source)
    indices += [None] * (len(shape) - len(indices))
    used = [d for d, t in enumerate(indices) if t is not None]
    if not used:
        return reader.load(source, position)
    if any(meta_of(indices[d]).dtype in (torch.bool, torch.uint8) for d in used):
        raise NotRecognised("unknown_op", f"indexing by a bool mask ({node.name})")
    broadcast = max(len(shape_of(indices[d])) for d in used)
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    shared = position[first : first + broadcast]
    others = iter(position[:first] + position[first + broadcast :])
    plain = {d: next(others) for d in range(len(shape)) if d not in used}

    def read(*values: Any) -> Value:
        found = plain | {d: _in_range(reader, v, shape[d], node) for d, v in zip(used, values, strict=True)}
        return reader.load(source, tuple(found[d] for d in range(len(shape))))

    return reader.algebra.lift(read, *(reader.operand(indices[d], shared) for d in used))


def _in_range(reader: MaskReader, at: sympy.Expr, extent: sympy.Expr, node: Node) -> sympy.Expr:
    for start in (at, sympy.expand(at + extent)):
        if reader.algebra.nonnegative(start) and reader.algebra.nonnegative(sympy.expand(extent - 1 - start)):
            return start
    raise NotRecognised("not_a_band", f"{node.name} reads position {at} of {extent}: not proved to be inside")
