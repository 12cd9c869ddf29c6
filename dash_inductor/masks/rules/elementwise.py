"""Rules of the mask reader for elementwise operators: comparison, logic, selection, conversion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Node

from ...graph.arguments import name_of
from ...upstream.promotion import elementwise_dtype
from ..index_expr import Leaf, NotRecognised, Value
from ..nodes import Position, as_expr, is_size, meta_of
from ..reader import MaskReader, Rule

RULES: dict[str, Rule] = {}

LeafOp = Callable[..., Value]


def _register(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update((name, rule) for name in names)
        return rule

    return add


def number(leaf: Leaf) -> sympy.Expr:
    """Return a leaf as a number; booleans become 0 or 1."""
    return sympy.Integer(int(leaf)) if isinstance(leaf, bool) else leaf


def convert(reader: MaskReader, value: Value, node: Node) -> Value:
    """Convert `value` to the dtype of `node`: to bool (nonzero), to an integer (truncated), or rounded to a float."""
    dtype = meta_of(node).dtype

    def leaf(x: Leaf) -> Value:
        if dtype == torch.bool:
            return _truth(reader, x)
        x = number(x)
        if not dtype.is_floating_point and not x.is_integer:
            if not (x.is_number and x.is_finite):
                raise NotRecognised("not_a_band", f"{node.name} turns inexact values into integers")
            x = sympy.Integer(int(x))
        return reader.exact(x, dtype)

    return reader.algebra.lift(leaf, value)


def _truth(reader: MaskReader, x: Leaf) -> Value:
    return x if isinstance(x, bool) else reader.algebra.lift(_negate, reader.algebra.equal_zero(x))


def _negate(x: Leaf) -> Value:
    return not x


def common_dtype(operands: list[Any]) -> torch.dtype:
    """Return the dtype to which an elementwise operator promotes its operands."""
    return elementwise_dtype(*(x.meta["val"] if isinstance(x, Node) else x for x in operands))


def elementwise(
    names: str,
    compute: Callable[[MaskReader], LeafOp],
    truth: Callable[..., bool] | None = None,
    meet: Callable[[list[Any], Node], torch.dtype] = lambda operands, _: common_dtype(operands),
) -> Rule:
    """Return the rule of an elementwise operator on numbers.

    Args:
        names: the names of its operands in the schema, separated by spaces.
        compute: computes the exact result from operands that are exact in the dtype to which they are promoted.
        truth: the operation on bool tensors; None if it is not supported there.
        meet: returns the dtype to which the operands are promoted.
    """

    def rule(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
        given = [args[name] for name in names.split() if args.get(name) is not None]
        dtype = meet(given, node)
        values = [reader.operand(x, position) for x in given]
        if dtype == torch.bool:
            if truth is None:
                raise NotRecognised("unknown_op", f"{node.target} ({node.name}) on bool tensors")
            return reader.algebra.lift(truth, *values)
        op = compute(reader)

        def leaf(*operands: Leaf) -> Value:
            return op(*(reader.exact(number(x), dtype) for x in operands))

        result = reader.algebra.lift(leaf, *values)
        return convert(reader, result, node)

    return rule


# Comparison


def _compared(sign: int, strict: bool) -> Callable[[MaskReader], LeafOp]:
    def compute(reader: MaskReader) -> LeafOp:
        def leaf(a: sympy.Expr, b: sympy.Expr) -> Value:
            if sympy.nan in (a, b):
                return False
            if a == b:  # also for infinities, whose difference is no number
                return not strict
            return reader.algebra.at_least_zero(sign * (a - b), strict)

        return leaf

    return compute


def _equal(reader: MaskReader) -> LeafOp:
    return lambda a, b: (
        bool(a == b and a is not sympy.nan) if a.is_number and b.is_number else reader.algebra.equal_zero(a - b)
    )


def _not_equal(reader: MaskReader) -> LeafOp:
    return lambda a, b: reader.algebra.lift(_negate, _equal(reader)(a, b))


RULES["aten::ge"] = elementwise("self other", _compared(1, False), lambda a, b: a >= b)
RULES["aten::gt"] = elementwise("self other", _compared(1, True), lambda a, b: a > b)
RULES["aten::le"] = elementwise("self other", _compared(-1, False), lambda a, b: a <= b)
RULES["aten::lt"] = elementwise("self other", _compared(-1, True), lambda a, b: a < b)
RULES["aten::eq"] = elementwise("self other", _equal, lambda a, b: a == b)
RULES["aten::ne"] = elementwise("self other", _not_equal, lambda a, b: a != b)


# Logic (bool tensors; the bitwise ops on integers are not read)


def _logic(truth: Callable[..., bool]) -> Rule:
    def rule(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
        given = [args[name] for name in ("self", "other") if name in args]
        logical = "logical" in str(node.target)
        if not logical and common_dtype(given) != torch.bool:
            raise NotRecognised("unknown_op", f"{node.target} ({node.name}) on integers")

        def leaf(*operands: Leaf) -> Value:
            return reader.algebra.lift(truth, *(_truth(reader, x) for x in operands))

        return reader.algebra.lift(leaf, *(reader.operand(x, position) for x in given))

    return rule


for _prefix in ("aten::bitwise_", "aten::logical_"):
    RULES[_prefix + "and"] = _logic(lambda a, b: a and b)
    RULES[_prefix + "or"] = _logic(lambda a, b: a or b)
    RULES[_prefix + "xor"] = _logic(lambda a, b: a != b)
    RULES[_prefix + "not"] = _logic(lambda a: not a)
RULES["aten::__and__"] = RULES["aten::bitwise_and"]
RULES["aten::__or__"] = RULES["aten::bitwise_or"]
RULES["aten::__xor__"] = RULES["aten::bitwise_xor"]


# Selection and conversion


def _selected(condition: str, then: str, other: str) -> Rule:
    def rule(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
        decided = reader.algebra.lift(lambda x: _truth(reader, x), reader.operand(args[condition], position))
        return reader.choose(
            decided,
            lambda: convert(reader, reader.operand(args[then], position), node),
            lambda: convert(reader, reader.operand(args[other], position), node),
        )

    return rule


RULES["aten::where"] = _selected("condition", "self", "other")
RULES["aten::masked_fill"] = _selected("mask", "value", "self")


def _copied(source: str) -> Rule:
    def rule(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
        return convert(reader, reader.operand(args[source], position), node)

    return rule


for _names, _source in (
    ("clone alias detach _to_copy lift_fresh lift_fresh_copy positive", "self"),
    ("copy", "src"),
    ("fill", "value"),
):
    RULES.update((f"aten::{name}", _copied(_source)) for name in _names.split())
for _name in ("convert_element_type", "device_put"):
    RULES["prims::" + _name] = _copied("a")


@_register("get_attr")
def _get_attr(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    """Return the value of a constant tensor of the graph, which must be one number (``torch.tensor(5)`` in a model)."""
    del args
    holder: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        holder = getattr(holder, name)
    if type(holder) not in (torch.Tensor, torch.nn.Parameter) or holder.numel() != 1:
        raise NotRecognised("unknown_op", f"get_attr {node.target}")
    return convert(reader, as_expr(holder.item()), node)


@_register("placeholder")
def _placeholder(reader: MaskReader, node: Node, args: dict[str, Any], position: Position) -> Value:
    del reader, args, position
    if is_size(node):
        raise NotRecognised("unknown_op", f"size {node.name} is used as a tensor")
    raise NotRecognised("depends_on_input", f"input {name_of(node)}")
