"""A term of a mask as it was read: what it makes of the nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch.fx import Node

from ..model.terms import TERMS
from .predicates import Conditional, LoadComparison, comparisons, compute, of_loads
from .token_data import Axis, Load
from .token_vectors import PLANE, Calculator


class FoundTerm:
    """A term of `model.terms`, with the nodes from which its operands are computed.

    Attributes:
        NAME: the term's.
        fields: the operands that there are.
        same: operands that are one tensor with another, which is named; only that one is computed.
    """

    NAME: ClassVar[str]

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(TERMS[self.NAME].ROLES)

    @property
    def same(self) -> Mapping[str, str]:
        return {}

    @property
    def comparisons(self) -> list[LoadComparison]:
        """The comparisons of data with numbers."""
        return []

    @property
    def loads(self) -> list[Load]:
        """The loads of data that it reads."""
        raise NotImplementedError

    def renamed(self, node: Callable[[Node], Node]) -> FoundTerm:
        """The same of other nodes."""
        raise NotImplementedError

    def compute(self, calculator: Calculator) -> dict[str, Any]:
        """The operands by field, without those that are the `same` as another."""
        raise NotImplementedError


@dataclass(frozen=True)
class Where(FoundTerm):
    """The keys, or the pairs, that a predicate of data chooses.

    Args:
        axes: the dimensions of what it chooses.
    """

    choice: Conditional
    axes: tuple[Axis, ...]

    @property
    def comparisons(self) -> list[LoadComparison]:
        return [*comparisons(self.choice)]

    @property
    def loads(self) -> list[Load]:
        return [found.load for found in self.comparisons]

    def renamed(self, node: Callable[[Node], Node]) -> Where:
        return replace(self, choice=of_loads(self.choice, lambda of: replace(of, node=node(of.node))))

    def compute(self, calculator: Calculator) -> dict[str, Any]:
        (field,) = self.fields
        return {field: compute(self.choice, self.axes, calculator)}


@dataclass(frozen=True)
class ValidKeys(Where):
    """The keys that are valid."""

    NAME = "keys"

    axes: tuple[Axis, ...] = ("b", "kv")


@dataclass(frozen=True)
class ShownPairs(Where):
    """The pairs of each head that may see each other."""

    NAME = "dense"

    axes: tuple[Axis, ...] = PLANE

    def within(self, window: Mapping[Axis, tuple[int, int]]) -> ShownPairs:
        """The same in a window of the scores."""
        return replace(self, choice=of_loads(self.choice, lambda load: load.within(window)))
