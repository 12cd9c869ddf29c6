"""Seeds of dropout, drawn together with the seeds of all other random operators of a graph, as Inductor does it.

Note [One draw for a graph]
A program may run the same function with and without gradients, or run it again in the backward (activation
checkpointing), and expects the same random numbers each time.  So what a graph draws must depend neither on how its
kernels are ordered, nor on whether it has a backward.  Inductor draws the seeds of all random operators of a graph by
one node, in graph order; the seeds of dropout are among them.  The seeds that the forward drew are saved for the
backward, because drawing again would give different ones.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ...graph.emit import Emitter
from ...operators.attention import dropout_seed
from ...upstream import configs, seeds
from .match import Match
from .saved import saved


def seed(emitter: Emitter, match: Match, before: Node) -> Node:
    """Inserts the dropout seed of a site before `before`, int64 [1].  It is always saved, never recomputed."""
    drawn = emitter.call(seeds.seed, (match.device,), before=before, like=before)
    node = emitter.call(dropout_seed, (drawn, match.node.name), before=before, like=before)
    saved(node)
    return node


def draw_at_once(graph: Graph) -> None:
    """Fuses the drawing of all seeds into one node under Inductor's `fallback_random`, where Inductor does not."""
    if configs.inductor.fallback_random:
        seeds.fuse_seed_creation_pass(graph)
