"""Mask components as they are read from a graph, with the computation of their operands from nodes of the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch.fx import Node

from ..model.components import COMPONENTS
from .predicates import Conditional, LoadComparison, comparisons, compute, of_loads
from .token_data import Axis, Load
from .token_vectors import PLANE, Calculator


class FoundComponent:
    """A component of `model.components`, with the nodes from which its operands are computed.

    Attributes:
        NAME: the name of the component.
        fields: the operands that are present.
        same: operands that are the same tensor as another operand, which is named; only the latter is computed.
    """

    NAME: ClassVar[str]

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the operands that are present."""
        return tuple(COMPONENTS[self.NAME].ROLES)

    @property
    def same(self) -> Mapping[str, str]:
        """Operands that are the same tensor as another operand, by name."""
        return {}

    @property
    def comparisons(self) -> list[LoadComparison]:
        """The comparisons of data with numbers."""
        return []

    @property
    def loads(self) -> list[Load]:
        """The loads of data that the component reads."""
        raise NotImplementedError

    def renamed(self, node: Callable[[Node], Node]) -> FoundComponent:
        """Return the same component with its nodes replaced by `node`."""
        raise NotImplementedError

    def compute(self, calculator: Calculator) -> dict[str, Any]:
        """Return the operands by field, except those that are the `same` as another."""
        raise NotImplementedError


@dataclass(frozen=True)
class Where(FoundComponent):
    """The keys, or the pairs, for which a predicate of data is true.

    Args:
        choice: the predicate.
        axes: the dimensions of its result.
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
    """A key padding mask: the valid keys."""

    NAME = "keys"

    axes: tuple[Axis, ...] = ("b", "kv")


@dataclass(frozen=True)
class ShownPairs(Where):
    """A dense mask: the visible pairs of each batch element and head."""

    NAME = "dense"

    axes: tuple[Axis, ...] = PLANE

    def within(self, window: Mapping[Axis, tuple[int, int]]) -> ShownPairs:
        """Return the same component restricted to a window of the scores."""
        return replace(self, choice=of_loads(self.choice, lambda load: load.within(window)))
