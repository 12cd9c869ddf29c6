"""The normal form of a mask: from its visibility, a decision tree over positions and data, to its terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import sympy
from torch.fx import Node

from ..model.mask import Band
from .bands import Scores, hides_a_row, to_band
from .index_expr import Branch, NotRecognised, Value, assume, same
from .predicates import Choice, Comparison, Predicate, comparisons, predicate
from .token_data import Load, Loads

MAX_CASES = 200
"""Combinations of conditions on data that are looked at; real masks have two."""


@dataclass(frozen=True)
class Terms:
    """The terms of a mask, with the nodes that they read.

    Args:
        band: which pairs of positions may see each other.
        keys: which keys are valid; None if all are.
    """

    band: Band
    keys: Choice | None = None

    @property
    def comparisons(self) -> list[Comparison]:
        """What data are compared with."""
        return [] if self.keys is None else list(comparisons(self.keys))

    @property
    def loads(self) -> list[Load]:
        """What the terms read of data."""
        return list(dict.fromkeys(comparison.load for comparison in self.comparisons))

    def renamed(self, node: Callable[[Node], Node]) -> Terms:
        """The same terms of other nodes."""

        def part(found: Predicate) -> Predicate:
            if isinstance(found, bool):
                return found
            load = replace(found.comparison.load, node=node(found.comparison.load.node))
            return Choice(replace(found.comparison, load=load), part(found.then), part(found.other))

        keys = None if self.keys is None else part(self.keys)
        assert not isinstance(keys, bool)
        return replace(self, keys=keys)

    def __str__(self) -> str:
        return " & ".join([str(self.band), *(["keys" for _ in [self.keys] if self.keys])])


def terms(scores: Scores, visible: Value, loads: Loads) -> Terms:
    """The terms whose conjunction `visible` is.

    Every combination of the conditions on data leaves a mask of positions alone.  If that is nothing or always the same
    band, the combinations that leave the band say which keys are valid.

    Raises:
        NotRecognised: "not_a_band" if positions alone decide otherwise, "depends_on_input" if data do.
    """
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
    keys = predicate(tree, lambda cond: _of_keys(scores, cond, loads))
    return Terms(bands.pop(), None if isinstance(keys, bool) else keys)


def _data_condition(scores: Scores, value: Value) -> sympy.Expr | None:
    """The outermost condition of a tree that contains data."""
    if not isinstance(value, Branch):
        return None
    if scores.algebra.has_data(value.cond):
        return value.cond
    return _data_condition(scores, value.then) or _data_condition(scores, value.other)


def _of_keys(scores: Scores, cond: sympy.Expr, loads: Loads) -> Comparison:
    """A condition on data that belong to keys."""
    found = loads.of(cond)
    names = ", ".join(load.node.name for load in found)
    if scores.q in scores.algebra.moved_by(cond):
        raise NotRecognised("depends_on_input", f"{names}, computed from an input, decides which queries see a key")
    comparison = Comparison.of(cond, loads.symbol(found[0]), found[0]) if len(found) == 1 else None
    if comparison is None:
        raise NotRecognised("depends_on_input", f"{names}, computed from an input, is compared with more than a number")
    return comparison


def require_visible_keys(scores: Scores, found: Terms) -> None:
    """Raise unless every query provably sees a key: a row of equal finite values is a uniform softmax, no empty one."""
    if found.keys is not None:
        names = ", ".join(sorted({load.node.name for load in found.loads}))
        cause = f"{names}, computed from an input, may hide all keys of a query by a finite value"
        raise NotRecognised("depends_on_input", cause)
    if hides_a_row(scores, found.band):
        raise NotRecognised("not_a_band", f"{found.band} may hide all keys of a query by a finite value")
