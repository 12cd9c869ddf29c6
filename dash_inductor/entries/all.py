"""The ways in which attention comes into a graph, in the order in which they are looked for."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph

from . import flash_attn, flex_attention, math_path, sdpa, varlen
from .attention import Entry, Found

ENTRIES: tuple[Entry, ...] = (
    sdpa.find,
    varlen.find,
    flash_attn.find,
    flex_attention.find,
    math_path.find,
)


def attentions(graph: Graph) -> Iterator[Found]:
    """Every attention of a graph, by its entry."""
    for find in ENTRIES:
        yield from find(graph)
