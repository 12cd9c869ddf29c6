"""Values of a graph that Inductor computes once."""

from __future__ import annotations

from torch.fx import Node

_WRITTEN = "inductor_realize_to_strides"  # what Inductor's lowering of a node looks for in its metadata


def write_once(node: Node) -> None:
    """Let Inductor write a tensor to memory, from where all that read it take it."""
    node.meta[_WRITTEN] = True
