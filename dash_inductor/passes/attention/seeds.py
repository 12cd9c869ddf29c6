"""Draws the seeds of dropout in attentions, as Inductor does it: together with all other random seeds of a graph.

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
    """Inserts the dropout seed of an attention, int64 [1], before the node `before`, and returns its node.

    The seed is always saved for the backward, never recomputed.
    """
    drawn = emitter.call(seeds.seed, (match.device,), before=before, like=before)
    node = emitter.call(dropout_seed, (drawn, match.node.name), before=before, like=before)
    saved(node)
    return node


def draw_at_once(graph: Graph) -> None:
    """Fuses the nodes that draw a graph's seeds into one if Inductor does not: when its `fallback_random` is set."""
    if configs.inductor.fallback_random:
        seeds.fuse_seed_creation_pass(graph)
