"""Adds temporary nodes to a graph while attention is searched in it; in the end, those that nothing uses are erased."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from ..upstream.pytree import tree_leaves
from .emit import Emitter, erase_dead

_TEMPORARY = "dash_inductor_temporary"
_OF_A_REGION = ("recompute", "ac_graph_id")
"""Metadata that assigns a node to a region of activation checkpointing; temporary nodes belong to none."""


class Temporaries:
    """Adds temporary nodes to a graph while attention is searched in it; `erase` removes those that nothing uses.

    Equal calls of an operator share one node.  It is placed directly after its arguments, so that all later nodes can
    use it.
    """

    def __init__(self, graph: Graph) -> None:
        self._emitter = _TemporaryEmitter(graph)
        self._known: dict[Any, Node] = {}

    @property
    def graph(self) -> Graph:
        """The graph to which temporary nodes are added."""
        return self._emitter.graph

    def call(self, target: Callable[..., Any], *args: Any, like: Node, **kwargs: Any) -> Node:
        """Return a temporary node ``target(*args, **kwargs)``, an existing or a new one with the metadata of `like`."""
        key = target, _token(args), _token(kwargs)
        if key not in self._known:
            sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Node)]
            before = self._emitter.behind(max(sources)) if sources else self._first
            self._known[key] = self._emitter.call(target, args, kwargs, before=before, like=like)
        return self._known[key]

    def size(self, tensor: Node, dim: int, *, like: Node) -> int | Node:
        """Return the size of a dimension of a tensor: a number if it is static, else a node that computes it.

        Args:
            tensor: the tensor.
            dim: the dimension.
            like: the node whose metadata a new node gets.
        """
        return self._emitter.size(tensor, dim, before=self._emitter.behind(tensor), like=like)

    @property
    def _first(self) -> Node:
        node: Node
        for node in self.graph.nodes:
            if node.op != "placeholder":
                return node
        raise ValueError("the graph has no output")


class _TemporaryEmitter(Emitter):
    """An emitter whose nodes are marked as temporary nodes, even if an error is raised while one is added."""

    def call(self, *args: Any, **kwargs: Any) -> Node:
        before = len(self.created)
        try:
            return super().call(*args, **kwargs)
        finally:
            for node in self.created[before:]:
                node.meta[_TEMPORARY] = True
                for name in _OF_A_REGION:
                    node.meta.pop(name, None)


def users(node: Node) -> list[Node]:
    """Return the users of a node that are not temporary nodes."""
    return [user for user in node.users if _TEMPORARY not in user.meta]


def erase(graph: Graph) -> None:
    """Erase the temporary nodes that nothing uses; the others become ordinary nodes."""
    temporaries = [node for node in graph.nodes if _TEMPORARY in node.meta]
    erase_dead(graph, list(temporaries))
    for node in graph.nodes:
        node.meta.pop(_TEMPORARY, None)


def _token(value: Any) -> Any:
    """Return a key that distinguishes arguments; 1, 1.0 and True have different keys."""
    if isinstance(value, Node):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_token, value))
    if isinstance(value, dict):
        return tuple((name, _token(item)) for name, item in value.items())
    return type(value), repr(value)
