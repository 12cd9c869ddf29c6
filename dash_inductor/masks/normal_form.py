"""Converts a mask's visibility, a decision tree over positions and data, to its normal form: a band and components."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch.fx import Node

from ..model.components import COMPONENTS
from ..model.mask import Band
from .bands import Scores, hides_a_row, to_band
from .documents import Documents
from .found import FoundComponent, ShownPairs, ValidKeys
from .index_expr import Branch, NotRecognised, Value, assume, leaves, same
from .predicates import LoadComparison, predicate
from .restarts import Restarts
from .splits import SPLITS
from .token_data import Axis, Load, Loads
from .token_vectors import Calculator, Numbers, computable

MAX_CASES = 200
"""The maximum number of combinations of conditions on data; real masks have two."""


@dataclass(frozen=True)
class SameSegment(FoundComponent):
    """Segment ids: a query sees a key only if the two have the same segment id.

    Args:
        q, kv: the numbers (segment ids) of the queries and of the keys.
        is_one_vector: whether query i and key i always have the same number, so that one tensor suffices.
    """

    NAME = "segments"

    q: Numbers
    kv: Numbers
    is_one_vector: bool

    @property
    def same(self) -> Mapping[str, str]:
        return {"kv": "q"} if self.is_one_vector else {}

    @property
    def loads(self) -> list[Load]:
        return [load for side in (self.q, self.kv) for _, load in side.loads]

    def renamed(self, node: Callable[[Node], Node]) -> SameSegment:
        return replace(self, q=self.q.renamed(node), kv=self.kv.renamed(node))

    def compute(self, calculator: Calculator) -> dict[str, Any]:
        q = {"q": self.q.compute(calculator)}
        return q if self.is_one_vector else q | {"kv": self.kv.compute(calculator)}


@dataclass(frozen=True)
class Components:
    """The components of a mask, with the nodes that they read.

    Args:
        band: the band mask on positions.
        others: the components besides the band; each is also the attribute of its name, None if absent.
        positions: the positions from which segment ids are counted, if the band depends on it (see `restarts`).
        documents: the packed documents of a varlen operator, in place of `others`; None for other operators.
    """

    band: Band
    others: tuple[FoundComponent, ...] = ()
    positions: Load | None = None
    documents: Documents | None = None

    def __getattr__(self, name: str) -> Any:
        if name in COMPONENTS:
            return next((component for component in self.others if name == component.NAME), None)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def in_order(self) -> list[FoundComponent]:
        """The components besides the band, in the order of `COMPONENTS`."""
        return sorted(self.others, key=lambda component: [*COMPONENTS].index(component.NAME))

    @property
    def comparisons(self) -> list[LoadComparison]:
        """The comparisons of data with constants in all components."""
        return [found for component in self.others for found in component.comparisons]

    @property
    def loads(self) -> list[Load]:
        """The loads of data that the components read, without duplicates."""
        return list(dict.fromkeys(load for component in self.others for load in component.loads))

    def renamed(self, node: Callable[[Node], Node]) -> Components:
        """Return these components with each node n that they read replaced by ``node(n)``."""
        positions = None if self.positions is None else replace(self.positions, node=node(self.positions.node))
        return replace(self, others=tuple(component.renamed(node) for component in self.others), positions=positions)

    def __str__(self) -> str:
        others = [component.NAME for component in self.in_order]
        return " & ".join([*([] if self.band.is_full and others else [str(self.band)]), *others])


def components(
    scores: Scores,
    visible: Value,
    loads: Loads,
    restarts: Restarts | None,
    *,
    of_data: bool,
    of_positions: bool = False,
) -> Components:
    """Split the condition `visible` into components of which it is the conjunction: a band, and further ones.

    With `restarts`, comparisons of position ids, intervals and dilations are split off first.  The rest has conditions
    on data; for each combination of their outcomes it depends on positions alone, and must be the same band or show
    nothing.  The combinations that leave the band determine the valid keys, and may require one equality of numbers
    (segment ids).  Without `restarts`, they determine which query sees which key, as a dense mask.

    Args:
        scores: the symbols of the scores.
        visible: the visibility of a pair.
        loads: the loads of data for which the data symbols stand.
        restarts: relates position ids and document ids of packed documents; None to read a dense mask.
        of_data: whether the mask depends on data.
        of_positions: whether intervals may depend on positions alone, and on heads.

    Raises:
        NotRecognised: "not_a_band" if the dependence on positions is not a band, or no query sees a key;
            "depends_on_input" if the components cannot express the dependence on data, or it has too many combinations.
    """
    positions = None
    split_off: list[FoundComponent | None] = []
    if restarts is not None:
        visible, positions = _without_positions(scores, visible, loads, restarts)
        for split in SPLITS:
            visible, found_component = split(scores, visible, loads, of_data, of_positions)
            split_off.append(found_component)
    bands: set[Band] = set()
    cases = 0

    def shows_band(value: Value) -> Value:
        nonlocal cases
        cond = _data_condition(scores, value)
        if cond is None:
            cases += 1
            band = to_band(scores, value)
            bands.update(() if band is None else (band,))
            if len(bands) > 1:
                raise NotRecognised("depends_on_input", f"data decide between {' and '.join(map(str, bands))}")
            if cases > MAX_CASES:
                raise NotRecognised("depends_on_input", f"more than {MAX_CASES} combinations of data")
            return band is not None
        then, other = (shows_band(assume(value, cond, truth)) for truth in (True, False))
        return then if same(then, other) else Branch(cond, then, other)

    tree = shows_band(visible)
    if not bands:
        raise NotRecognised("not_a_band", "no query sees a key")
    if restarts is None:
        dense = predicate(tree, lambda cond: _of_numbers(cond, loads))
        return Components(bands.pop(), () if isinstance(dense, bool) else (ShownPairs(dense),))
    equal = _equalities(scores, tree)
    if len(equal) > 1:
        raise NotRecognised("depends_on_input", f"{len(equal)} equalities of numbers of queries and of keys")
    for symbol in equal:
        if any(leaves(assume(tree, symbol - 1, False))):
            raise NotRecognised("depends_on_input", f"{_named(scores, symbol, loads)}: they decide more than segments")
        tree = assume(tree, symbol - 1, True)
    keys = predicate(tree, lambda cond: _of_keys(scores, cond, loads))
    segments = _segments(scores, equal.pop(), loads) if equal else None
    valid = None if isinstance(keys, bool) else ValidKeys(keys)
    found = [component for component in (valid, segments, *split_off) if component is not None]
    return Components(bands.pop(), tuple(found), positions)


def _without_positions(scores: Scores, visible: Value, loads: Loads, restarts: Restarts) -> tuple[Value, Load | None]:
    """Return `visible` without comparisons of positions in packed documents, and these positions; see `restarts`."""
    for symbol in _equalities(scores, visible):
        segments = _segments(scores, symbol, loads)
        inside, outside = (assume(visible, symbol - 1, truth) for truth in (True, False))
        if any(leaves(outside)) or not segments.is_one_vector or not segments.q.expr.is_Symbol:
            continue
        number, used = segments.loads[0], set[Load]()

        def in_places(value: Value, number: Load = number, used: set[Load] = used) -> Value:
            if not isinstance(value, Branch):
                return value
            cond = _in_places(scores, value.cond, loads, restarts, number, used)
            then, other = in_places(value.then), in_places(value.other)
            if cond is None:
                return scores.algebra.branch(value.cond, then, other)
            return scores.algebra.choose(scores.algebra.at_least_zero(cond), then, other)

        found = in_places(inside)
        if len(used) == 1:
            return Branch(symbol - 1, found, False), used.pop()
    return visible, None


def _in_places(
    scores: Scores, cond: sympy.Expr, loads: Loads, restarts: Restarts, number: Load, used: set[Load]
) -> sympy.Expr | None:
    """Return a condition on the difference of two positions in one document as one on indices.

    Return None for other conditions.
    """
    found = loads.named_in(cond)
    of_query, of_key = ([(symbol, load) for symbol, load in found if axis in load.axes] for axis in ("q", "kv"))
    if len(found) != 2 or len(of_query) != 1 or len(of_key) != 1:
        return None
    (one, query), (other, key) = of_query[0], of_key[0]
    sign = cond.coeff(one)
    known = restarts.difference(number, query, key) if cond.coeff(other) == -sign and sign in (1, -1) else None
    if known is None:
        return None
    used.add(known[1])
    return sympy.expand(cond - sign * (one - other) + sign * (scores.q - scores.kv + known[0]))


def _equalities(scores: Scores, tree: Value) -> set[sympy.Symbol]:
    """Return the data symbols of a tree that stand for the equality of a number of the query and one of the key."""
    if not isinstance(tree, Branch):
        return set()
    here = {symbol for symbol in tree.cond.free_symbols if scores.algebra.equality(symbol) is not None}
    return here | _equalities(scores, tree.then) | _equalities(scores, tree.other)


def _segments(scores: Scores, symbol: sympy.Symbol, loads: Loads) -> SameSegment:
    """Return the equality for which a symbol stands, as a component."""
    sides = scores.algebra.equality(symbol)
    assert sides is not None
    found = []
    axes: tuple[Axis, ...] = ("q", "kv")
    for axis, position, expr in zip(axes, (scores.q, scores.kv), sides, strict=True):
        _require_no_heads(scores, expr, loads)
        if not computable(expr, position, scores.sizes, scores.algebra):
            raise NotRecognised("depends_on_input", f"{_named(scores, symbol, loads)}: they may overflow")
        found.append(Numbers(expr, axis, position, loads.named_in(expr)))
    q, kv = found
    return SameSegment(q, kv, scores.q_len == scores.kv_len and q.reads_as(kv))


def _named(scores: Scores, symbol: sympy.Symbol, loads: Loads) -> str:
    sides = scores.algebra.equality(symbol)
    assert sides is not None
    names = [", ".join(load.node.name for _, load in loads.named_in(side)) or str(side) for side in sides]
    return f"{names[0]} of the query is compared with {names[1]} of the key"


def _data_condition(scores: Scores, value: Value) -> sympy.Expr | None:
    """Return the outermost condition of a tree that contains data; None without one."""
    if not isinstance(value, Branch):
        return None
    if scores.algebra.has_data(value.cond):
        return value.cond
    return _data_condition(scores, value.then) or _data_condition(scores, value.other)


def _of_keys(scores: Scores, cond: sympy.Expr, loads: Loads) -> LoadComparison:
    """Return a condition on data of the keys; raise NotRecognised for data of the queries."""
    if scores.q in scores.algebra.moved_by(cond):
        names = ", ".join(load.node.name for _, load in loads.named_in(cond))
        raise NotRecognised("depends_on_input", f"{names}, which is data, decides which queries see a key")
    _require_no_heads(scores, cond, loads)
    return _of_numbers(cond, loads)


def _require_no_heads(scores: Scores, expr: sympy.Expr, loads: Loads) -> None:
    """Raise NotRecognised if data that vary between heads decide."""
    if scores.h in scores.algebra.moved_by(expr):
        names = ", ".join(load.node.name for _, load in loads.named_in(expr))
        raise NotRecognised("depends_on_input", f"{names}, which is data, differs between heads")


def _of_numbers(cond: sympy.Expr, loads: Loads) -> LoadComparison:
    """Return a condition that compares data with a number; raise NotRecognised for other conditions."""
    found = loads.named_in(cond)
    comparison = LoadComparison.of(cond, *found[0]) if len(found) == 1 else None
    if comparison is None:
        names = ", ".join(load.node.name for _, load in found)
        raise NotRecognised("depends_on_input", f"{names}, which is data, is compared with more than a number")
    return comparison


def require_visible_keys(scores: Scores, found: Components) -> None:
    """Raise NotRecognised unless every query provably sees a key; for masks that hide keys by finite values.

    If a finite value hides all keys of a query, its softmax is uniform, while kernels treat the row as empty.
    """
    if found.loads:
        names = ", ".join(sorted({load.node.name for load in found.loads}))
        cause = f"{names}, which is data, may hide all keys of a query by a finite value"
        raise NotRecognised("depends_on_input", cause)
    by_query = any(COMPONENTS[component.NAME].RELATION.queries for component in found.others)
    if by_query or hides_a_row(scores, found.band):
        raise NotRecognised("not_a_band", f"{found} may hide all keys of a query by a finite value")
