"""The seeds of dropout: one draw for all sites of a graph, part of the draw that Inductor makes for the rest of it.

Note [One draw for a graph]
A program may run the same function with and without gradients, or run it again in the backward (activation
checkpointing), and expects the same random numbers each time.  So a graph draws the seeds of all its sites at once, in
the order of the forward, and together with those of other random operators, for which Inductor makes one node: what is
drawn then does not depend on how kernels are ordered, nor on whether there is a backward.  What the forward drew is
saved for the backward; a second draw would be another one.
"""

from __future__ import annotations

import torch
from torch._inductor import inductor_prims
from torch.fx import Graph, Node

from ..ops import dropout_seed
from .attention_ops import is_attention_backward
from .emit import Emitter
from .saved import saved
from .sites import Match


class Seeds:
    """The seeds of one graph, handed out in the order in which they are asked for: that of the forward."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._drawn: dict[torch.device, Node] = {}

    def next(self, emitter: Emitter, match: Match, before: Node) -> Node:
        """The seed of a site, in front of `before`: int64 [1].

        Nothing computes it again, however much else is computed again.
        """
        seeds = self._draw(match.device, before)
        count, device = seeds.args
        assert isinstance(count, int)
        with torch._guards.detect_fake_mode(seeds.meta["val"]):
            seeds.args, seeds.meta["val"] = (count + 1, device), seeds.meta["val"].new_empty(count + 1)
        node = emitter.call(dropout_seed, (seeds, count, match.node.name), before=before, like=before)
        saved(node)
        return node

    def _draw(self, device: torch.device, before: Node) -> Node:
        """The node that draws the seeds, in front of `before`."""
        if device in self._drawn:
            return self._drawn[device]
        seeds = self._of_inductor(device)
        if seeds is None:
            # By an emitter of its own: where a site cannot be replaced, what others read stays.
            seeds = Emitter(self._graph).call(inductor_prims.seeds, (0, device), before=before, like=before)
        elif not seeds < before:
            before.prepend(seeds)
        saved(seeds)
        self._drawn[device] = seeds
        return seeds

    def _of_inductor(self, device: torch.device) -> Node | None:
        """The node that draws the seeds of the forward's other random operators on a device."""
        for node in self._graph.nodes:
            if is_attention_backward(node):
                return None
            if node.target is inductor_prims.seeds and node.args[1] == device:
                return node
        return None
