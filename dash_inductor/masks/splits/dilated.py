"""Reads dilation from a mask's visibility: the keys whose distance to the query has a given remainder.

The visibility has it as conditions on ``(query - key) % divisor``, which leave a single remainder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch.fx import Node

from ...upstream.symbolic import PythonMod
from ..bands import Scores
from ..found import FoundComponent
from ..index_expr import Value, conditions_of, conjuncts_of
from ..token_data import Load, Loads
from ..token_vectors import Calculator, Numbers, computable

MAX_STEP = 2**31
"""Larger divisors are not read."""


@dataclass(frozen=True)
class Congruent(FoundComponent):
    """Dilation: a query sees a key only if `step` divides the difference of `number` and the key's position.

    Attributes:
        number: a number for each query.
        step: the distance between two keys that a query sees.
    """

    NAME = "dilated"

    number: Numbers
    step: int

    @property
    def loads(self) -> list[Load]:
        return [load for _, load in self.number.loads]

    def renamed(self, node: Callable[[Node], Node]) -> Congruent:
        """Return this dilation with each node n that it reads replaced by ``node(n)``."""
        return replace(self, number=self.number.renamed(node))

    def compute(self, calculator: Calculator) -> dict[str, Any]:
        """Return the values of `number` and `step` by these names, int64 vectors with one element per query."""
        step = replace(self.number, expr=sympy.Integer(self.step), loads=())
        return {"number": self.number.compute(calculator), "step": step.compute(calculator)}


def split(scores: Scores, visible: Value, loads: Loads, *_: bool) -> tuple[Value, Congruent | None]:
    """Split the visibility of a mask into a conjunction of the rest and a dilation; return both.

    Return `visible` itself and None if no dilation is found.
    """
    for remainder in _remainders(visible):
        base, divisor = remainder.args
        sign = base.coeff(scores.kv)
        of_query = sympy.expand(base - sign * scores.kv)
        of_remainder = [cond for cond in conditions_of(visible) if cond.as_coeff_Add()[1] in (remainder, -remainder)]
        conjuncts, rest = conjuncts_of(visible, of_remainder)
        least, most = 0, int(divisor) - 1
        for cond in conjuncts:
            bound, term = cond.as_coeff_Add()
            least, most = (max(least, -int(bound)), most) if term == remainder else (least, min(most, int(bound)))
        number = sympy.expand(sign * (least - of_query))
        if least == most and sign in (1, -1) and _is_of_query(scores, number):
            return rest, Congruent(Numbers(number, "q", scores.q, loads.named_in(number)), int(divisor))
    return visible, None


def _remainders(visible: Value) -> list[sympy.Expr]:
    """Return the remainders in conditions whose divisors are numbers that are not too large."""
    found = {part for cond in conditions_of(visible) for part in cond.atoms(PythonMod)}
    return sorted((part for part in found if part.args[1].is_Integer and 0 < part.args[1] < MAX_STEP), key=str)


def _is_of_query(scores: Scores, number: sympy.Expr) -> bool:
    """Return whether a number depends on the query, but not on the key, and can be computed."""
    moved_by = scores.algebra.moved_by(number)
    computes = computable(number, scores.q, scores.sizes, scores.algebra)
    return scores.q in moved_by and scores.kv not in moved_by and computes
