"""Nodes that are in a graph so that it can be read, and that stay where something has come to use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from ..upstream.pytree import tree_leaves
from .emit import Emitter, erase_dead

_DRAFT = "dash_inductor_draft"
_OF_A_REGION = ("recompute", "ac_graph_id")
"""Metadata that says in which region of activation checkpointing a node is: a draft is in none."""


class Drafts:
    """Adds nodes to a graph for the time in which it is read; `erase` takes back those that nothing uses.

    Equal operators on the same arguments are one node.  It stands directly behind its arguments, where all later nodes
    can use it.
    """

    def __init__(self, graph: Graph) -> None:
        self._emitter = _DraftEmitter(graph)
        self._known: dict[Any, Node] = {}

    @property
    def graph(self) -> Graph:
        return self._emitter.graph

    def call(self, target: Callable[..., Any], *args: Any, like: Node, **kwargs: Any) -> Node:
        """``target(*args, **kwargs)``, a new node with the metadata of `like` or an old one."""
        key = target, _token(args), _token(kwargs)
        if key not in self._known:
            sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Node)]
            before = self._emitter.behind(max(sources)) if sources else self._first
            self._known[key] = self._emitter.call(target, args, kwargs, before=before, like=like)
        return self._known[key]

    def size(self, tensor: Node, dim: int, *, like: Node) -> int | Node:
        """A size of a tensor: its number, or a node that has it."""
        return self._emitter.size(tensor, dim, before=self._emitter.behind(tensor), like=like)

    @property
    def _first(self) -> Node:
        node: Node
        for node in self.graph.nodes:
            if node.op != "placeholder":
                return node
        raise ValueError("the graph has no output")


class _DraftEmitter(Emitter):
    """Its nodes are drafts, also one at which an error has been raised."""

    def call(self, *args: Any, **kwargs: Any) -> Node:
        before = len(self.created)
        try:
            return super().call(*args, **kwargs)
        finally:
            for node in self.created[before:]:
                node.meta[_DRAFT] = True
                for name in _OF_A_REGION:
                    node.meta.pop(name, None)


def users(node: Node) -> list[Node]:
    """The users of a node that are no drafts."""
    return [user for user in node.users if _DRAFT not in user.meta]


def erase(graph: Graph) -> None:
    """Erase the drafts that nothing uses; the others are of the graph from now on."""
    drafts = [node for node in graph.nodes if _DRAFT in node.meta]
    erase_dead(graph, list(drafts))
    for node in graph.nodes:
        node.meta.pop(_DRAFT, None)


def _token(value: Any) -> Any:
    """What tells two arguments apart: 1, 1.0 and True are three of them."""
    if isinstance(value, Node):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_token, value))
    if isinstance(value, dict):
        return tuple((name, _token(item)) for name, item in value.items())
    return type(value), repr(value)
