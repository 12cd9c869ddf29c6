"""The relations: predicates by which mask components decide whether a query sees a key.

Note [Relations]
    A component names its relation (`model.components`); code below the model layer only knows relations.  A relation
    declares which numbers it reads per query, per key and per pair, and has a test of a pair.  The test is a plain
    function of operators, so that the same source serves torch, Inductor and Triton (`kernels.portable.templates`
    pastes it).  Kernels that read tile schedules from tables use a device encoding of a relation, see
    `kernels.common.relations`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Axis = Literal["b", "h", "q", "kv"]
"""A dimension of the scores: batch elements, query heads, queries, keys."""

PLANE: tuple[Axis, ...] = ("b", "h", "q", "kv")
"""The dimensions of the scores."""

POSITION = "position"
"""In `Relation.missing`: the number of a key is its position."""


@dataclass(frozen=True)
class Relation:
    """A predicate on a query and a key.

    A role names one of the numbers that the predicate reads, such as the segment id of a query.

    Args:
        name: the name in kernel source.
        test: a function ``test(shown, queries, keys)`` that returns `shown` (a boolean per pair), cleared for the pairs
            that the predicate hides.  `queries` has the numbers of the query; `keys` has those of the key, then those
            of the pair; both are in the order of the roles.  Each is a number or an array that broadcasts to the pairs,
            or None where `missing` has a number for an absent operand; None hides nothing.
        queries, keys, pairs: the roles of the numbers of a query, of a key, and of a pair.
        truths: whether the numbers are booleans (zero or nonzero); otherwise they are integers of any dtype and value.
        segment_ids: whether the predicate can be encoded as equality of one segment id per query and one per key.
        missing: for roles that a component may omit, a number that shows all pairs, or `POSITION` for the position of
            the key.
    """

    name: str
    test: Callable[[Any, tuple[Any, ...], tuple[Any, ...]], Any]
    queries: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    truths: bool = False
    segment_ids: bool = False
    missing: Mapping[str, int | str] = field(default_factory=dict, hash=False)

    @property
    def roles(self) -> tuple[str, ...]:
        """The names of all numbers that the predicate reads: those of the query, then of the key, then of the pair."""
        return *self.queries, *self.keys, *self.pairs

    @property
    def is_of_keys(self) -> bool:
        """Whether the predicate depends on the key alone, so that kernels read it as one vector."""
        return not self.queries and not self.pairs

    def axes(self, role: str) -> tuple[Axis, ...]:
        """Return the dimensions of the operand that holds the numbers of a role.

        They are ("b", "q") for a number per query, ("b", "kv") per key, and ("b", "h", "q", "kv") per pair.

        Args:
            role: one of `roles`.
        """
        if role in self.pairs:
            return PLANE
        return ("b", "q") if role in self.queries else ("b", "kv")

    def shows(self, values: Mapping[str, Any], kv: Any) -> Any:
        """Return a boolean per pair: whether the query sees the key.

        Args:
            values: by role, numbers or arrays that broadcast to the pairs.
            kv: the positions of the keys, which broadcast likewise.
        """
        numbers = {role: kv if number == POSITION else None for role, number in self.missing.items()} | dict(values)
        queries, keys = self.queries, (*self.keys, *self.pairs)
        return self.test(True, tuple(numbers[role] for role in queries), tuple(numbers[role] for role in keys))


def equal(shown, queries, keys):  # type: ignore[no-untyped-def]  # on devices too
    return shown & (queries[0] == keys[0])


def between(shown, queries, keys):  # type: ignore[no-untyped-def]  # on devices too
    if queries[0] is not None:
        shown = shown & (queries[0] <= keys[0])
    if queries[1] is not None:
        shown = shown & (keys[0] <= queries[1])
    return shown


def congruent(shown, queries, keys):  # type: ignore[no-untyped-def]  # on devices too
    step = queries[1] + (queries[1] == 0)
    return shown & ((queries[0] - keys[0]) % step == 0)


def true(shown, _queries, keys):  # type: ignore[no-untyped-def]  # on devices too
    return shown & (keys[0] != 0)


EQUAL = Relation("equal", equal, queries=("q",), keys=("kv",), segment_ids=True)
"""A query sees the keys whose number equals its own (segment ids)."""

BETWEEN = Relation(
    "between", between, queries=("least", "most"), keys=("number",),
    missing={"least": -(2**62), "most": 2**62, "number": POSITION},
)  # fmt: skip
"""A query sees the keys whose number lies between its two bounds, inclusive."""

CONGRUENT = Relation(
    "congruent", congruent, queries=("number", "step"), keys=("position",), missing={"position": POSITION}
)
"""A query sees the keys at a distance from its number that its step divides; the step 0 divides all, as 1 does."""

TRUTH = Relation("truth", true, keys=("valid",), truths=True, segment_ids=True)
"""All queries see the keys whose boolean is true (key padding)."""

PAIRS = Relation("pairs", true, pairs=("shown",), truths=True)
"""A query sees a key if the boolean of the pair is true, for each batch element and head (dense mask)."""

RELATIONS = frozenset({EQUAL, BETWEEN, CONGRUENT, TRUTH, PAIRS})
"""All relations."""


def fit_tables(relations: Sequence[Relation]) -> bool:
    """Return whether tile schedules in tables can encode a mask that consists of these relations.

    They can unless a relation reads a number per pair, such as the elements of a dense mask.  The tables can hold one
    such relation, as bits, if `segment_ids` is true for every other relation.
    """
    of_pairs = [relation for relation in relations if relation.pairs]
    return not of_pairs or (len(of_pairs) == 1 and all(of.segment_ids or of.pairs for of in relations))
