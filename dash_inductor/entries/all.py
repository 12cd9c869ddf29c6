"""The ways in which attention comes into a graph, in the order in which they are looked for."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph

from . import by_hand, flex_attention, sdpa, varlen
from .attention import Entry, Found

ENTRIES: tuple[Entry, ...] = (
    sdpa.find,
    varlen.find,
    flex_attention.find,
    by_hand.find,
)


def attentions(graph: Graph) -> Iterator[Found]:
    """Every attention of a graph, by its entry."""
    for find in ENTRIES:
        yield from find(graph)
