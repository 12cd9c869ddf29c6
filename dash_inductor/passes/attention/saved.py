"""Protects the tensors that an attention's backward reads from in-place writes between forward and backward.

A program may write to a tensor between a forward and its backward.  In eager mode, autograd compares the version
counter of each saved tensor and raises an error.  A compiled forward returns what its backward needs.  Graph inputs
among these still have their version counters checked.  A view of an input does not, because Inductor returns it as a
separate tensor that shares the input's memory: the backward would silently read what the program has written.

Note [What the backward reads]
Three rules prevent that:

* Views of graph inputs and outputs that a dash_inductor backward reads are recomputed in the backward.  PyTorch then
  saves their base tensor, with its version counter.
* The part of an input that a mask reads is copied in the forward, as eager attention copies it into a float mask, so
  that the program may reuse its buffer.  Vectors (valid keys, document ids) are small and always saved.
* The output of attention and its log-sum-exp are saved, too.  If the graph returns one of them, the program gets the
  tensor whose version is checked.  If the graph returns a view of it, which would be a separate tensor, the program
  gets a view of a copy, and so do all results that share its memory.  A matrix product is a view, too
  (`_unsafe_view`), which the graph does not show: the output of decomposed attention is therefore always returned as
  a copy.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from ...graph import sizes
from ...graph.emit import Emitter
from ...graph.nodes import is_joint
from ...graph.views import chain, shows_input
from ...operators.attention import attention_backward
from ...upstream.pytree import tree_map_only

_UNWATCHED = "dash_inductor_unwatched"


def saved(node: Node) -> None:
    """Marks a value that PyTorch's partitioner must save for the backward (`CheckpointPolicy.MUST_SAVE`)."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def unwatched(node: Node) -> None:
    """Marks an attention output of which the graph must return a copy, because writes to it would not be detected."""
    node.meta[_UNWATCHED] = True


def watch(graph: Graph) -> None:
    """Protects the tensors that dash_inductor's backwards in a joint graph read from the program's in-place writes.

    Note [What the backward reads] in this module has the rules.  Other graphs are not changed.
    """
    if not is_joint(graph):
        return
    backwards = [node for node in graph.nodes if node.target is attention_backward]
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
    """Makes the graph return copies instead of views of `outputs` and `sums`; for a part of one, a view of a copy.

    Results that share the memory of one of them are views of one copy, so that they still share memory.  Packed
    attention's outputs always count as views, because a template may return them as one.

    Args:
        outputs: the attention outputs that backwards read.
        sums: the log-sum-exps that backwards read.
    """
    results, emitter = graph.output_node(), Emitter(graph)
    showing: dict[Node, dict[Node, list[Node]]] = {}  # for each output or sum, the results and the views that show it
    for node in results.all_input_nodes:
        views = list(chain(node))
        place = next((place for place, view in enumerate(views) if view in outputs | sums), None)
        if place is not None:
            showing.setdefault(views[place], {})[node] = views[:place]
    copies: dict[Node, Node] = {}
    for shown, found in showing.items():
        only = next(iter(found)) if len(found) == 1 else None
        watched = _UNWATCHED not in shown.meta and (shown in sums or shown.meta["val"].dim() == 4)
        if only is shown and watched:
            continue
        if only is not None and sizes.same(*(sizes.spanned(node.meta["val"]) for node in (only, shown))):
            copies[only] = emitter.copied(only, before=results, like=only)
            continue
        copies[shown] = emitter.copied(shown, before=results, like=shown)
        for view in itertools.chain.from_iterable(map(reversed, found.values())):
            if view not in copies:
                assert callable(view.target)
                args = copies[view.all_input_nodes[0]], *view.args[1:]
                copies[view] = emitter.call(view.target, args, view.kwargs, before=results, like=view)
    results.args = tree_map_only(Node, lambda node: copies.get(node, node), results.args)
