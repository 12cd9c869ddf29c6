"""Interprets the producers of a mask tensor: the value of one element as a function of its position.

`MaskReader.load(node, position)` asks a node for its element at a symbolic position; the node's rule asks its own
inputs at the positions they are read from, until constants and index ramps are reached.  Nothing is materialised, and
nothing assumed: what is not proved to be exact for all positions and sizes raises `NotRecognised`.  The rules live in
`mask_ops` and `arithmetic_ops` (elementwise), `index_ops` (creation and movement) and `reduce_ops`, keyed by operator
name; arguments are bound by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .attention_ops import bind, op_name
from .index_expr import Algebra, Leaf, NotRecognised, Value

Position = tuple[sympy.Expr, ...]
Rule = Callable[["MaskReader", Node, dict[str, Any], Position], Value]

MAX_PRODUCERS = 400
"""Longest producer chain that is looked at; real masks have about 60 nodes."""

MAX_ENTRIES = 2**57
"""Most batch entries or heads: attention writes a gradient for each of them, and no address space is larger."""

_EXACT_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Integers up to 2**bits are exact in these types."""

_CREATION = "arange full full_like ones ones_like zeros zeros_like new_full new_ones new_zeros scalar_tensor"
_UNDEFINED = "empty empty_like new_empty empty_strided new_empty_strided empty_permuted"
CREATION = frozenset({"prims::iota"} | {f"aten::{name}" for name in f"{_CREATION} {_UNDEFINED}".split()})
"""Operators whose result depends on the shape and type of their tensor arguments only, never on the values."""


def is_size(node: Node) -> bool:
    """Whether the node is a number (a size, or arithmetic on sizes) and no tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def as_expr(value: object) -> sympy.Expr:
    """A Python number, SymInt, or number-valued node as an exact sympy number or expression in size symbols."""
    if isinstance(value, Node):
        if not is_size(value):
            raise NotRecognised("unknown_op", f"{value.name} is used as a number")
        value = value.meta["val"]
    if isinstance(value, torch.SymInt):
        return value.node.expr
    if isinstance(value, (bool, int)):
        return sympy.Integer(int(value))
    if isinstance(value, float):
        if math.isnan(value):
            return sympy.nan
        return sympy.oo * (1 if value > 0 else -1) if math.isinf(value) else sympy.Rational(value)
    raise NotRecognised("unknown_op", f"argument {value!r} of type {type(value).__name__}")


def meta_of(node: Node) -> torch.Tensor:
    """The node's fake tensor (shape and dtype)."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise NotRecognised("unknown_op", f"{node.name} ({node.target}) has no tensor value")
    return value


def shape_of(node: Node) -> Position:
    return tuple(as_expr(n) for n in meta_of(node).shape)


def shape_env_of(nodes: list[Node]) -> ShapeEnv | None:
    """The shape environment of the size symbols in the nodes' shapes; None if all are static."""
    for node in nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                return cast(ShapeEnv, size.node.shape_env)
    return None


def producers(node: Node) -> list[Node]:
    """All nodes whose values `node` depends on, numbers included, inputs first.

    Raises:
        NotRecognised: "depends_on_input" as soon as a tensor input of the graph is met; "unknown_op" for endless
        chains.
    """
    order: dict[Node, None] = {}
    stack: list[tuple[Node, bool]] = [(node, False)]
    seen: set[Node] = set()
    while stack:
        current, done = stack.pop()
        if done:
            order[current] = None
            continue
        if current in seen:
            continue
        seen.add(current)
        if current.op == "placeholder" and not is_size(current):
            raise NotRecognised("depends_on_input", f"input {current.name}")
        stack.append((current, True))
        if not is_size(current):  # a number is known as an expression in the graph's size symbols
            lends_shape_only = op_name(current) in CREATION
            stack.extend((n, False) for n in current.all_input_nodes if is_size(n) or not lends_shape_only)
    if len(order) > MAX_PRODUCERS:
        raise NotRecognised("unknown_op", f"a chain of {len(order)} nodes is longer than {MAX_PRODUCERS}")
    for current in order:
        _require_unchanged(current)
    return list(order)


def _require_unchanged(node: Node) -> None:
    """Graphs after AOTAutograd are functional; should one not be, a tensor that is written in place cannot be read."""
    for user in node.users:
        if isinstance(user.target, torch._ops.OpOverload):
            schema = user.target._schema
            written = (
                argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
            )
            if any(value is node and write for value, write in zip(user.args, written, strict=False)):
                raise NotRecognised("unknown_op", f"{user.target} ({user.name}) writes to {node.name}")
            if any(result.alias_info is not None for result in schema.returns):
                _require_unchanged(user)


class MaskReader:
    """The elements of every node of one producer chain, by symbolic position."""

    def __init__(self, rules: dict[str, Rule], shape_env: ShapeEnv | None) -> None:
        self.algebra = Algebra(shape_env)
        self._rules = rules
        self._memo: dict[tuple[Node, Position], Value] = {}
        self._bound: dict[Node, dict[str, Any]] = {}

    def load(self, node: Node, position: Position) -> Value:
        """The element of `node` at `position` (one index expression per dimension)."""
        key = (node, position)
        if key not in self._memo:
            if 0 in shape_of(node):
                raise NotRecognised("not_a_band", f"{node.name} has no elements")
            if node not in self._bound:
                self._bound[node] = bind(node) if isinstance(node.target, torch._ops.OpOverload) else {}
            rule = self._rules.get(op_name(node) if node.op == "call_function" else node.op)
            if rule is None:
                raise NotRecognised("unknown_op", f"{node.target} ({node.name})")
            self._memo[key] = rule(self, node, self._bound[node], position)
        return self._memo[key]

    def operand(self, value: Any, position: Position) -> Value:
        """An operand of an elementwise op: a tensor broadcast to `position`, or a scalar."""
        if isinstance(value, bool):
            return value
        if not isinstance(value, Node) or is_size(value):
            return as_expr(value)
        shape = shape_of(value)
        tail = position[len(position) - len(shape) :]
        return self.load(value, tuple(sympy.S.Zero if n == 1 else i for n, i in zip(shape, tail, strict=True)))

    def choose(self, condition: Value, then: Callable[[], Value], other: Callable[[], Value]) -> Value:
        """`then` where the condition holds, else `other`; a side that no element takes is not read."""
        if isinstance(condition, bool):
            return then() if condition else other()
        return self.algebra.choose(condition, then(), other())

    def exact(self, leaf: Leaf, dtype: torch.dtype) -> Leaf:
        """A value as `dtype` holds it: constants rounded to a float type, everything else unchanged.

        Raises:
            NotRecognised: "not_a_band" where it is not proved that the type holds it, for every position and size.
        """
        if isinstance(leaf, bool):
            return leaf
        limits = _exact_integers(dtype)
        if leaf.is_number and dtype.is_floating_point and limits is not None:
            return _rounded(leaf, dtype)
        if leaf.is_integer and limits is not None:
            low, high = self.algebra.lower(leaf), self.algebra.upper(leaf)
            if low is not None and high is not None and limits[0] <= low and high <= limits[1]:
                return leaf
        raise NotRecognised("not_a_band", f"{leaf} is not proved to be exact in {dtype}")


def _exact_integers(dtype: torch.dtype) -> tuple[int, int] | None:
    """The range in which a type holds every integer; None for types that are not read."""
    if dtype in _EXACT_BITS:
        return -(2 ** _EXACT_BITS[dtype]), 2 ** _EXACT_BITS[dtype]
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex or dtype.itemsize > 8:
        return None
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _rounded(number: sympy.Expr, dtype: torch.dtype) -> sympy.Expr:
    """A number in a float type, as PyTorch rounds it: arithmetic in half types is float32's, rounded once more."""
    if not number.is_Rational:
        return number  # infinities and NaN
    try:
        value = int(number.p) / int(number.q)
    except OverflowError:
        value = math.copysign(math.inf, number)
    return as_expr(
        torch.tensor(value, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32)).to(dtype).item()
    )
