"""Mask components as they are read from a graph; each knows how its operands are computed from the graph's nodes."""

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
    """A mask component that was read from a graph, with the nodes from which its operands are computed.

    Attributes:
        NAME: the name of the component's kind in `model.components.COMPONENTS`.
    """

    NAME: ClassVar[str]

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the operands that this component has."""
        return tuple(COMPONENTS[self.NAME].ROLES)

    @property
    def same(self) -> Mapping[str, str]:
        """The operands that are not computed because each equals another one, by name, with the other's name."""
        return {}

    @property
    def comparisons(self) -> list[LoadComparison]:
        """The comparisons of data with constants by which the component is defined; empty for most components."""
        return []

    @property
    def loads(self) -> list[Load]:
        """The loads (elements of the graph's tensors, by position) that the component reads."""
        raise NotImplementedError

    def renamed(self, node: Callable[[Node], Node]) -> FoundComponent:
        """Return this component with each node n that it reads replaced by ``node(n)``."""
        raise NotImplementedError

    def compute(self, calculator: Calculator) -> dict[str, Any]:
        """Compute the component's operands, except those in `same`; return them by name, as tensors or graph nodes.

        Args:
            calculator: computes on tensors, or adds nodes.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Where(FoundComponent):
    """A component that hides all keys, or all pairs, except those for which a predicate on data is true.

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
    """A key padding mask that was read from a graph: a predicate says which keys of each batch element are valid."""

    NAME = "keys"

    axes: tuple[Axis, ...] = ("b", "kv")


@dataclass(frozen=True)
class ShownPairs(Where):
    """A dense mask that was read from a graph: a predicate says which queries see which keys, per batch and head."""

    NAME = "dense"

    axes: tuple[Axis, ...] = PLANE

    def within(self, window: Mapping[Axis, tuple[int, int]]) -> ShownPairs:
        """Return the dense mask restricted to a window of the scores, given as (start, stop) for each axis."""
        return replace(self, choice=of_loads(self.choice, lambda load: load.within(window)))
