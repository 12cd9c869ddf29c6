"""Proves facts about the integers in a tensor from the graph: their bounds, and how often each of them occurs.

It also proves that they are a permutation, or derive from one.  No values are looked at.  A rule
(`integer_rules.RULES`) derives facts about an operator's result from facts about its inputs, and returns None if
nothing holds for all inputs of the program.  Proofs start at operators whose results are positions by definition:
`sort`, `topk`, `arange`, `randperm`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from ...graph import sizes
from ...graph.nodes import bind, op_name
from ...graph.sizes import Dim
from .indices import is_iota, source
from .integer_rules import DTYPES, RULES, Facts, Known, Values, fits, inverse_of, of_getitem

MOST = 1024
"""The maximum number of nodes in a proof; nothing is proved about a node that needs more."""

MOST_TIMES = 1 << 31
"""The limit of multiplicities, which grow with every operator; larger ones count as unknown."""


def values_of(node: Any) -> Known:
    """Returns what the graph proves about the integers in a node's tensor, as `Values`; None if it proves nothing."""
    return _facts(node).get(node)


def _facts(node: Any) -> Facts:
    """The facts about a node and all nodes of its proof; each node is examined once, after its arguments."""
    waiting, cone = [node], set[Node]()
    while waiting:
        each = waiting.pop()
        if each not in cone and _has_rule(each):
            cone.add(each)
            if len(cone) > MOST:
                return {}
            waiting += (each.args[0] if each.target is operator.getitem else each).all_input_nodes
    facts = dict[Any, Values]()
    for each in sorted(cone):
        if each.target is operator.getitem:
            found = of_getitem(each, facts)
        else:
            found = RULES[op_name(each)](each, bind(each), facts)
        if found is not None and fits(found, each.meta["val"].dtype):
            facts[each] = found if (found.times or 0) <= MOST_TIMES else Values(found.low, found.high)
    return facts


def _has_rule(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or value.dtype not in DTYPES:
        return False
    return isinstance(node.args[0], Node) if node.target is operator.getitem else op_name(node) in RULES


def distinct_along(node: Node, dim: int) -> bool:
    """Returns whether the integers in each 1-D slice of a node's tensor along `dim` are proved to be distinct."""
    facts = _facts(node)
    while True:
        value: Tensor = node.meta["val"]
        known = facts.get(node)
        if value.dim() == 0 or sizes.static(value.shape[dim]) == 1:
            return True
        if known is not None and known.differ:
            return True
        name, before = op_name(node), node.args[0] if node.args else None
        if not isinstance(before, Node):
            return False
        if node.target is operator.getitem:
            is_order = node.args[1] == 1 and op_name(before) in ("aten::sort", "aten::topk")
            return bool(is_order and bind(before)["dim"] % value.dim() == dim)
        if name not in _LINES or (known is None and name.endswith(("_to_copy", "convert_element_type"))):
            return False
        node = before


_LINES = frozenset(f"aten::{name}" for name in ("alias", "clone", "contiguous", "detach", "slice", "_to_copy")) | {
    "prims::convert_element_type"
}
"""The operators whose result lines contain a subset of the integers in the same line of their argument."""


@dataclass(frozen=True)
class Lists:
    """A list of row indices in which each row occurs equally often, described by a permutation `order`.

    Index i of the list is ``order[i] // times`` or, if `strided`, ``order[i] % rows``.

    Attributes:
        order: the node of the permutation; None for 0, 1, 2, ...
        times: how often each row occurs.
        strided: which of the two forms the indices have.
    """

    order: Node | None
    times: int
    strided: bool = False


def lists_of(node: Node, rows: Dim) -> Lists | None:
    """Describes indices, in row-major order, by a permutation, if each row provably occurs equally often; else None.

    If the number of rows is dynamic, a guard ensures that the indices select all rows.

    Args:
        node: the node of the indices.
        rows: the number of rows.
    """
    node = source(node)
    count = node.meta["val"].numel()
    known = values_of(node)
    if known is not None and known.is_permutation(count):
        return Lists(None if is_iota(node) else node, 1) if sizes.made_same(count, rows) else None
    return _divided(node, rows, count)


def _divided(node: Node, rows: Dim, count: Dim) -> Lists | None:
    """The lists with several indices per row, as MoE layers index tokens; None if that is not proved."""
    name = op_name(node)
    if name in ("aten::div", "aten::floor_divide"):
        args = bind(node)
        over, times = args["self"], args["other"]
        if not isinstance(times, int) or times < 1 or (name == "aten::div" and args.get("rounding_mode") != "floor"):
            return None
        return _of_permutation(over, times, rows, count, strided=False)
    if name == "aten::remainder":
        args = bind(node)
        over, over_rows = args["self"], args["other"]
        known = sizes.static(count)
        if not isinstance(over_rows, int) or known is None or over_rows < 1 or known % over_rows:
            return None
        return _of_permutation(over, known // over_rows, rows, count, strided=True)
    if name == "aten::index":  # [0, 0, 1, 1, ...][permutation]
        args = bind(node)
        if len(args["indices"]) != 1 or args["self"].meta["val"].dim() != 1:
            return None
        times = _repeated(args["self"], rows)
        return None if times is None else _of_permutation(args["indices"][0], times, rows, count, strided=False)
    times = _repeated(node, rows)
    return None if times is None else Lists(None, times)


def _of_permutation(order: Any, times: int, rows: Dim, count: Dim, strided: bool) -> Lists | None:
    if not isinstance(order, Node):
        return None
    order = source(order)
    known = values_of(order)
    if known is None or not known.is_permutation(count) or not sizes.same(order.meta["val"].numel(), count):
        return None
    if not sizes.made_same(rows * times, count):
        return None
    return Lists(None if is_iota(order) else order, times, strided)


def _repeated(node: Node, rows: Dim) -> int | None:
    """The number of times that a node repeats each of 0 to rows - 1, consecutively; None if it does not."""
    node = source(node)
    if op_name(node) != "aten::expand":
        return None
    of = node.args[0]
    assert isinstance(of, Node)
    shape, before = node.meta["val"].shape, of.meta["val"].shape
    times = sizes.static(shape[-1]) if len(shape) == 2 else None
    if times is None or len(before) != 2 or sizes.static(before[1]) != 1:
        return None
    return times if is_iota(of) and sizes.same(before[0], rows) and sizes.same(shape[0], rows) else None


def inverted(node: Node) -> Node | None:
    """Returns the node of the permutation whose inverse `node` is proved to compute; None if there is no proof."""
    return inverse_of(source(node), values_of)
