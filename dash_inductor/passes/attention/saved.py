"""A backward of ours reads memory of its forward that PyTorch watches, or values that are the graph's alone.

A program may write to a tensor between a forward and its backward.  In eager mode autograd notices it by the version
of each tensor that it saved, and raises an error.  A compiled forward returns what its backward needs.  Inputs of the
graph are watched there in the same way; a view of one is not, because Inductor hands it out as a tensor of its own
that has the memory of the input.  So the backward would silently read what the program has written.

Note [What the backward reads]
Three rules keep that from happening.  Views of inputs and outputs of the graph that a backward of ours reads are
computed again in the backward: PyTorch then saves what they are views of, under its version.  The part of an input that
a mask reads is copied by the forward, as eager attention copies it into a mask tensor of floats, so that a program may
use its own buffer again; vectors (valid keys, numbers of documents) are small and saved in any case.  And the output of
attention is saved, too, and its log-sum-exp.  Where the graph returns one of them, the program gets the tensor that is
watched; where the graph returns a view of it, which would be another tensor, the program gets a view of a copy.  The
product of two matrices is such a view (`_unsafe_view`) that no graph shows: so an output of attention by hand is
returned as a copy in any case.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from ...graph import sizes
from ...graph.emit import Emitter
from ...graph.nodes import is_joint
from ...graph.views import chain, shows_input
from ...operators.attention import BACKWARDS
from ...upstream.pytree import tree_map_only

_UNWATCHED = "dash_inductor_unwatched"


def saved(node: Node) -> None:
    """Let PyTorch save a value, however much else is computed again."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def unwatched(node: Node) -> None:
    """Let programs get a copy of an output of attention that PyTorch hands out as another tensor than it watches."""
    node.meta[_UNWATCHED] = True


def watch(graph: Graph) -> None:
    """Have PyTorch watch what the backwards of ours in a joint graph read: see Note [What the backward reads]."""
    if not is_joint(graph):
        return
    backwards = [node for node in graph.nodes if node.target in BACKWARDS]
    returned = set(graph.output_node().all_input_nodes)
    for node in backwards:
        grad_out = node.args[0]
        for read in node.all_input_nodes:
            *views, shown = chain(read)
            if read is not grad_out and (shows_input(shown) or shown in returned):
                for view in views:
                    view.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    _return_copies(graph, {node.args[4] for node in backwards}, {node.args[5] for node in backwards})


def _return_copies(graph: Graph, outputs: set[Any], sums: set[Any]) -> None:
    """Return copies in the place of views of these nodes, outputs and log-sum-exps, and views of copies for parts.

    An output of packed attention may be a view where a template has made it, so that it counts as one.
    """
    results, emitter = graph.output_node(), Emitter(graph)

    def returned(node: Node) -> Node:
        behind = list(chain(node))
        places = [place for place, view in enumerate(behind) if view in outputs | sums]
        if not places:
            return node
        if places[0] == 0 and _UNWATCHED not in node.meta and (node in sums or node.meta["val"].dim() == 4):
            return node
        views, shown = behind[: places[0]], behind[places[0]]
        if sizes.same(*(sizes.spanned(each.meta["val"]) for each in (node, shown))):
            return emitter.copied(node, before=results, like=node)
        found = emitter.copied(shown, before=results, like=shown)
        for view in reversed(views):
            assert callable(view.target)
            found = emitter.call(view.target, (found, *view.args[1:]), view.kwargs, before=results, like=view)
        return found

    results.args = tree_map_only(Node, returned, results.args)
