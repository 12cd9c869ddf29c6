"""The ways in which attention comes into a graph, in the order in which they are looked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch.fx import Graph, Node

from .. import failures
from ..graph.nodes import is_joint
from ..model.plan import Kept
from ..model.reasons import Reason
from . import decomposed, flash_attn, flex_attention, sdpa, unknown, unread, varlen
from .attention import Found, Frontend, Refusal

FRONTENDS: tuple[Frontend, ...] = (
    sdpa.find,
    varlen.find,
    flash_attn.find,
    flex_attention.find,
    decomposed.find,
)


def attentions(graph: Graph) -> Iterator[Found]:
    """Every attention of a graph, by its frontend; last what no frontend knows."""
    known: set[Node] = set()
    for find in (*FRONTENDS, partial(unknown.find, known=known), partial(unread.find, known=known)):
        try:
            for found in find(graph):
                known.update(_nodes(found))
                yield found
        except Exception as error:
            yield _failure(graph, getattr(find, "func", find).__module__, error)


def _nodes(found: Found) -> Iterator[Node]:
    """The nodes that tell an attention from all others."""
    yield found.node
    if found.place is not None:
        yield found.place
    if isinstance(found, Refusal):
        yield from found.of_line


def _failure(graph: Graph, name: str, error: Exception) -> Refusal:
    """The refusal of all that a frontend would have found, had it not failed."""
    text = failures.caught(f"{name}.find", error, recorded=True)
    kept = Kept(Reason.INTERNAL_ERROR, text)
    return Refusal(graph.output_node(), name, kept, is_joint(graph), None, everywhere=True)
