"""The relations by which terms of masks show pairs of a query and a key.

Note [Relations]
    A term names its relation (`model.terms`), and readers below it know relations alone.  A relation says which numbers
    a query, a key and a pair have, and tests a pair.  Its test is a plain function of operators, so that one text
    serves torch, Inductor and Triton (`kernels.portable.templates` pastes it).  Kernels that walk by tables read a
    relation in a form of their own, see `kernels.common.relations`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Axis = Literal["b", "h", "q", "kv"]
"""A dimension of the scores: batch elements, query heads, queries, keys."""

POSITION = "position"
"""The place of a missing number of a key: its position."""


@dataclass(frozen=True)
class Relation:
    """A relation of a query and a key.

    Args:
        name: in texts of kernels.
        test: which of the pairs that are shown so far it shows, too: a function of these, truth values, of a tuple of
            what queries have and of one of what keys, or pairs, have, in the order of the roles; numbers or arrays that
            broadcast to the pairs, or None for a number that is missing and shows all pairs.
        queries, keys, pairs: the roles of numbers that a query, a key or a pair has.
        truths: the numbers are truth values, zero or not; else they are integers, of any dtype and value.
        codes: equal codes of a query and a key can say all that it says.
        missing: of roles that a term may lack, a number that shows all pairs, or `POSITION` for the position of a key.
    """

    name: str
    test: Callable[[Any, tuple[Any, ...], tuple[Any, ...]], Any]
    queries: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    truths: bool = False
    codes: bool = False
    missing: Mapping[str, int | str] = field(default_factory=dict, hash=False)

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles: of queries, of keys, of pairs."""
        return *self.queries, *self.keys, *self.pairs

    @property
    def is_of_keys(self) -> bool:
        """Whether keys alone decide: the relation is a vector of keys, as kernels read one."""
        return not self.queries and not self.pairs

    def axes(self, role: str) -> tuple[Axis, ...]:
        """The dimensions of what has this role."""
        if role in self.pairs:
            return "b", "h", "q", "kv"
        return ("b", "q") if role in self.queries else ("b", "kv")

    def shows(self, values: Mapping[str, Any], kv: Any) -> Any:
        """Whether queries see keys: a truth value for each pair.

        Args:
            values: by role, numbers or arrays that broadcast to the pairs.
            kv: the positions of the keys, likewise.
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


def true(shown, _queries, keys):  # type: ignore[no-untyped-def]  # on devices too
    return shown & (keys[0] != 0)


EQUAL = Relation("equal", equal, queries=("q",), keys=("kv",), codes=True)
"""A query sees the keys whose number is its own."""

BETWEEN = Relation(
    "between", between, queries=("least", "most"), keys=("number",),
    missing={"least": -(2**62), "most": 2**62, "number": POSITION},
)  # fmt: skip
"""A query sees the keys whose number is one of two bounds or between them."""

TRUTH = Relation("truth", true, keys=("valid",), truths=True, codes=True)
"""All queries see the keys for which it is true."""

PAIRS = Relation("pairs", true, pairs=("shown",), truths=True)
"""A query of a head sees the keys for which the pair says so."""

RELATIONS = frozenset({EQUAL, BETWEEN, TRUTH, PAIRS})
"""All relations."""


def fit_tables(relations: Sequence[Relation]) -> bool:
    """Whether tables of walks have room for a mask of these: beside bits of pairs, there may be what codes can say."""
    of_pairs = [relation for relation in relations if relation.pairs]
    return not of_pairs or (len(of_pairs) == 1 and all(of.codes or of.pairs for of in relations))
