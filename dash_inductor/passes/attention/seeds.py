"""The seeds of dropout: drawn as Inductor draws the seeds of other random operators, all of a graph at once.

Note [One draw for a graph]
A program may run the same function with and without gradients, or run it again in the backward (activation
checkpointing), and expects the same random numbers each time.  So what a graph draws must depend neither on how its
kernels are ordered, nor on whether it has a backward.  Inductor draws the seeds of all random operators of a graph by
one node, in their order, with the seeds of dropout among them.  The numbers that the forward has drawn are saved for
the backward, because a second draw would be another one.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ...graph.emit import Emitter
from ...operators.attention import dropout_seed
from ...upstream import configs, seeds
from .match import Match
from .saved import saved


def seed(emitter: Emitter, match: Match, before: Node) -> Node:
    """The seed of a site, in front of `before`: int64 [1].  Nothing computes it again, however much else is."""
    drawn = emitter.call(seeds.seed, (match.device,), before=before, like=before)
    node = emitter.call(dropout_seed, (drawn, match.node.name), before=before, like=before)
    saved(node)
    return node


def draw_at_once(graph: Graph) -> None:
    """Draw all seeds by one node where Inductor does not do it: with its setting `fallback_random`."""
    if configs.inductor.fallback_random:
        seeds.fuse_seed_creation_pass(graph)
