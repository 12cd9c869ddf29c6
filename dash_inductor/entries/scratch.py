"""Nodes that an entry adds to a graph while it reads it, such as views of operands in the dimensions of attention.

They are for replaced attention alone: `erase` takes back all that nothing reads in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from ..graph.emit import Emitter, erase_dead

_SCRATCH = "dash_inductor_scratch"


def add(graph: Graph, target: Callable[..., Any], *args: Any, before: Node, like: Node, **kwargs: Any) -> Node:
    """A node in front of `before`, with the metadata of `like`."""
    node = Emitter(graph).call(target, args, kwargs, before=before, like=like)
    node.meta[_SCRATCH] = True
    return node


def is_scratch(node: Node) -> bool:
    return _SCRATCH in node.meta


def users(node: Node) -> list[Node]:
    """The users of a node that are the program's."""
    return [user for user in node.users if not is_scratch(user)]


def erase(graph: Graph) -> None:
    """Erase what was added and is not used; the rest is of the graph from now on."""
    added = [node for node in graph.nodes if is_scratch(node)]
    erase_dead(graph, list(added))
    for node in graph.nodes:
        node.meta.pop(_SCRATCH, None)
