"""Preserves size, strides and aliasing of a graph's outputs across passes.

A program may write to a tensor that a compiled forward returns, and may keep it for any time.  A pass may replace an
output by a view of a tensor that the backward reads (`known_masks`), or of a larger tensor (`pad_mm`).  A write to the
output would then change what the backward reads, or the output would keep more memory alive than the program expects.
So `Results` records before passes run which memory each output uses.  If an output shares more memory afterwards, the
graph returns a copy with the old strides.  Passes need not care about this.

AOTAutograd decides later which values the forward saves for the backward.  A value that is read by a node that depends
on a tangent is likely to be saved; a value on which such a node depends indirectly may be.  Both count as read by the
backward here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...graph import sizes
from ...graph.backward import of_backward
from ...graph.emit import Emitter
from ...graph.views import base, chain
from ...upstream.pytree import tree_leaves, tree_map_only

log = logging.getLogger("dash_inductor")
aten = torch.ops.aten


@dataclass(frozen=True)
class _Saved:
    """The nodes of a graph that its backward reads.

    Attributes:
        backward: the nodes that depend on a tangent.
        read: the forward nodes, owners of their memory, that backward nodes read directly or through views.
        needed: the forward nodes, owners of their memory, on which backward nodes depend, directly or not.
    """

    backward: Set[Node]
    read: Set[Node]
    needed: Set[Node]

    @classmethod
    def of(cls, graph: Graph) -> _Saved:
        backward, read, needed, wanted = of_backward(graph), set[Node](), set[Node](), set[Node]()
        nodes: list[Node] = list(graph.nodes) if backward else []
        for node in reversed(nodes):
            if node in backward:
                sources = [source for source in node.all_input_nodes if source not in backward]
                wanted.update(sources)
                read.update(map(base, sources))
            elif node in wanted:
                wanted.update(node.all_input_nodes)
                needed.add(base(node))
        return cls(backward, read, needed)


@dataclass(frozen=True)
class _Shown:
    """The memory of an output.

    Attributes:
        views: the output and the nodes of which it is a view, down to the one that owns the memory.
        read, needed: whether that node is in `_Saved.read`, or in `_Saved.needed`.
    """

    views: Sequence[Node]
    read: bool
    needed: bool

    @classmethod
    def by(cls, node: Node, saved: _Saved) -> _Shown:
        views = list(chain(node))
        return cls(views, views[-1] in saved.read, views[-1] in saved.needed)

    @property
    def base(self) -> Node:
        return self.views[-1]


class Results:
    """The outputs of a graph before passes run, each with the node that owns its memory; see the module."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._nodes = graph, set(graph.nodes)
        saved = _Saved.of(graph)
        self._shown = [_Shown.by(node, saved) for node in _results(graph)]

    def restore(self) -> None:
        """Makes the rewritten graph return copies of the outputs that share more memory than before the passes ran.

        A copy has the strides that the output had before.
        """
        saved = _Saved.of(self._graph)
        shown = [_Shown.by(node, saved) for node in _results(self._graph)]
        owners = {now.base: now.base for before, now in zip(self._shown, shown, strict=True) if now.base is before.base}
        copies = _Copies(self._graph)
        found: dict[Node, list[Node]] = {}
        for before, now in zip(self._shown, shown, strict=True):
            kept = not self._shows_more(before, now) and owners.setdefault(now.base, before.base) is before.base
            result = copies.of(before, now) if not kept else copies.of_no_view(before, now)
            found.setdefault(now.views[0], []).append(result)
        if copies.made:
            results = self._graph.output_node()
            results.args = tree_map_only(Node, lambda node: found[node].pop(0) if node in found else node, results.args)

    def _shows_more(self, before: _Shown, now: _Shown) -> bool:
        """Whether an output's memory is larger than before, or is now read by the backward or shared with an input."""
        same, is_own = now.base is before.base, now.base.op == "call_function"
        if not is_own:
            return not same
        if (now.read and not before.read) or (now.needed and not before.needed):
            return True
        if same:
            return False
        is_another = now.base in self._nodes and now.needed
        return is_another or not _spans_same(before.base, now.base)


class _Copies:
    """Makes copies for outputs; outputs that shared memory before share a copy."""

    def __init__(self, graph: Graph) -> None:
        self._emitter = Emitter(graph)
        self.made: dict[tuple[Node, ...], Node] = {}

    def of(self, before: _Shown, now: _Shown) -> Node:
        """Adds a copy of the output `now` with the memory layout of the output `before`; returns its node.

        If `before` was a part of memory that a rewrite has replaced, nothing is copied, and the result is the output
        itself.
        """
        old = dict(zip(before.views, before.views[1:], strict=False))
        views, copied, like = [], now.views[0], before.views[0]
        for view, source in zip(now.views, now.views[1:], strict=False):
            if view not in old:
                break
            views.append(view)
            copied, like = source, old[view]
        if not _spans_same(like, before.base) or sizes.dense_order(*_layout(like)) is None:
            log.warning("%s is a part of memory that a rewrite has replaced: its memory is another one", like)
            return now.views[0]
        key: tuple[Node, ...] = before.base, copied
        found = self.made.get(key)
        if found is None:
            place = self._emitter.behind(copied)
            found = self.made[key] = self._emitter.copied(copied, before=place, like=like)
        for view in reversed(views):
            key = *key, view
            if key not in self.made:
                assert callable(view.target)
                args = found, *view.args[1:]
                place = self._emitter.behind(max(found, view))
                self.made[key] = self._emitter.call(view.target, args, view.kwargs, before=place, like=view)
            found = self.made[key]
        return found

    def of_no_view(self, before: _Shown, now: _Shown) -> Node:
        """The output itself, or an `_unsafe_view` of it if the rewrite made it a view of memory that it alone uses.

        Autograd rejects in-place writes to views that a graph returns; an `_unsafe_view` does not count as a view.
        """
        node, key = now.views[0], (now.views[0],)
        if len(before.views) > 1 or len(now.views) == 1 or now.needed:
            return node
        if key not in self.made:
            value: Tensor = node.meta["val"]
            place, emitter = self._emitter.behind(node), self._emitter
            shape = [emitter.size(node, dim, before=place, like=node) for dim in range(value.dim())]
            place = emitter.behind(max([node, *(size for size in shape if isinstance(size, Node))]))
            self.made[key] = emitter.call(aten._unsafe_view.default, (node, shape), before=place, like=node)
        return self.made[key]


def _results(graph: Graph) -> list[Node]:
    """The tensors among the outputs of a graph, in order; a tensor that is returned twice appears twice."""
    leaves = tree_leaves(graph.output_node().args)
    return [leaf for leaf in leaves if isinstance(leaf, Node) and isinstance(leaf.meta.get("val"), Tensor)]


def _spans_same(one: Node, other: Node) -> bool:
    """Whether two tensors span the same amount of memory."""
    return sizes.same(*(sizes.spanned(node.meta["val"]) for node in (one, other)))


def _layout(node: Node) -> tuple[Sequence[sizes.Dim], Sequence[sizes.Dim]]:
    value: Tensor = node.meta["val"]
    return value.shape, value.stride()
