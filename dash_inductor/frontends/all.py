"""The frontends, which find attention in a joint or forward graph, in the order in which they search it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch.fx import Graph, Node

from .. import failures
from ..graph.nodes import is_joint
from ..model.plan import Fallback
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
    """Yield every attention in the graph, frontend by frontend; last, as `Refusal`s, those that no frontend supports.

    An exception in one frontend is caught, logged and yielded as a `Refusal` of the whole graph; the others still run.
    """
    known: set[Node] = set()
    for find in (*FRONTENDS, partial(unknown.find, known=known), partial(unread.find, known=known)):
        try:
            for found in find(graph):
                known.update(_nodes(found))
                yield found
        except Exception as error:
            yield _failure(graph, getattr(find, "func", find).__module__, error)


def _nodes(found: Found) -> Iterator[Node]:
    """Yield the nodes that identify this attention, so that the last searches do not report it again."""
    yield found.node
    if found.place is not None:
        yield found.place
    if isinstance(found, Refusal):
        yield from found.of_line


def _failure(graph: Graph, name: str, error: Exception) -> Refusal:
    """Return the refusal that stands for everything a frontend would have found, had it not raised `error`."""
    text = failures.caught(f"{name}.find", error, recorded=True)
    fallback = Fallback(Reason.INTERNAL_ERROR, text)
    return Refusal(graph.output_node(), name, fallback, is_joint(graph), None, everywhere=True)
