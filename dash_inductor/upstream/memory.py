"""Tensors of a graph that Inductor computes once."""

from __future__ import annotations

from torch.fx import Node

WRITTEN_ONCE = "inductor_realize_to_strides"
"""What Inductor looks for in the metadata of a node that it is about to lower."""


def write_once(node: Node) -> None:
    """Let Inductor write a tensor to memory, where all others read it, and compute it in none of their kernels."""
    node.meta[WRITTEN_ONCE] = True
