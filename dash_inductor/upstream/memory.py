"""Marks tensors of a graph that Inductor must compute only once, instead of once per reader."""

from __future__ import annotations

from torch.fx import Node

WRITTEN_ONCE = "inductor_realize_to_strides"
"""The key in a node's metadata that makes Inductor realize the node when it lowers it."""


def write_once(node: Node) -> None:
    """Makes Inductor write a tensor to memory for all its readers, instead of recomputing it in their kernels."""
    node.meta[WRITTEN_ONCE] = True
