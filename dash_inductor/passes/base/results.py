"""Keeps the memory of a graph's results as it was before passes: sizes, strides, and what shares it.

A program may write to a tensor that a compiled forward returns, and may keep it for any time.  A pass may replace a
result by a view of something that the backward reads (`known_masks`), or of larger memory (`pad_mm`).  A write to that
result would then change what the backward reads, or the result would keep more memory alive than the program knows of.
So `Results` records the memory of each result before passes run.  Where a result shares more afterwards, the graph
returns a copy with the old strides, so that no pass has to care.

Which values a forward saves for the backward is decided after this pass.  A value that a node with a tangent among its
arguments reads is likely to be saved; a value that such a node depends on may be.  A copy is made in both cases.
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
    """What the backward in a graph reads.

    Attributes:
        backward: nodes that depend on a tangent.
        read: nodes with memory of their own, without such a tangent, that nodes of the backward read, also by views.
        needed: nodes with memory of their own that a node of the backward depends on.
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
    """The memory that a result shows.

    Attributes:
        views: the result, and the nodes behind it, down to the one that has the memory.
        read, needed: whether the backward reads this memory, or depends on it, as in `_Saved`.
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
    """The results of a graph before it is rewritten."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._nodes = graph, set(graph.nodes)
        saved = _Saved.of(graph)
        self._shown = [_Shown.by(node, saved) for node in _results(graph)]

    def restore(self) -> None:
        """Return copies in the place of results that show more than before, once the graph has been rewritten."""
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
        """Whether a result shows memory that is larger than before, or that has other readers."""
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
    """Copies of what results show; results that shared memory before share a copy."""

    def __init__(self, graph: Graph) -> None:
        self._emitter = Emitter(graph)
        self.made: dict[tuple[Node, ...], Node] = {}

    def of(self, before: _Shown, now: _Shown) -> Node:
        """A result that has the values of `now` and the layout of `before`."""
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
        """A result itself; where it has become a view, of memory that no one else reads, one that is none to autograd,
        which refuses writes to views that graphs return.
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
    """The tensors among the results of a graph, one for each place."""
    leaves = tree_leaves(graph.output_node().args)
    return [leaf for leaf in leaves if isinstance(leaf, Node) and isinstance(leaf.meta.get("val"), Tensor)]


def _spans_same(one: Node, other: Node) -> bool:
    """Whether tensors span as much memory."""
    return sizes.same(*(sizes.spanned(node.meta["val"]) for node in (one, other)))


def _layout(node: Node) -> tuple[Sequence[sizes.Dim], Sequence[sizes.Dim]]:
    value: Tensor = node.meta["val"]
    return value.shape, value.stride()
