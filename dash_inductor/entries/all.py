"""The ways in which attention comes into a graph, in the order in which they are looked for."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, Node

from . import by_hand, flash_attn, flex_attention, sdpa, unknown, varlen
from .attention import Entry, Found

ENTRIES: tuple[Entry, ...] = (
    sdpa.find,
    varlen.find,
    flash_attn.find,
    flex_attention.find,
    by_hand.find,
)


def attentions(graph: Graph) -> Iterator[Found]:
    """Every attention of a graph, by its entry; last what no entry knows."""
    known: set[Node] = set()
    for find in ENTRIES:
        for found in find(graph):
            known.add(found.node)
            yield found
    yield from unknown.find(graph, known)
