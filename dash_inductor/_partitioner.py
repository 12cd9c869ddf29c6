"""What PyTorch's partitioner takes a forward of ours for: the operator that it stands in the place of.

The partitioner decides which values the forward saves for the backward, and which are computed again.  It knows a few
operators by name as too expensive for a second run, unless `activation_memory_budget` asks for one, and then weighs
them by their FLOPs, for which `ops` has formulas.  An operator that it does not know is run again wherever a byte can
be saved.  So a node of ours carries the name of what it replaces, and whatever list the partitioner looks it up in,
that name is looked up: PyTorch's attention is in some of its lists and not in others, and which those are is its matter.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Node

STANDS_FOR = "dash_inductor_stands_for"
"""In a node's metadata: the qualified name of PyTorch's operator, as ``aten::mm``."""


def install() -> None:
    """Make the partitioner look up what a node stands for.  Nodes without that name are looked up as ever."""
    from torch._functorch import partitioners

    plain = partitioners.get_aten_target  # the partitioner looks it up by this name for every node

    @functools.wraps(plain)
    def target(node: Node) -> Any:
        name = node.meta.get(STANDS_FOR)
        return plain(node) if name is None else _operator(name)

    partitioners.get_aten_target = target


@functools.cache
def _operator(name: str) -> torch._ops.OpOverloadPacket:
    namespace, _, short = name.partition("::")
    found: torch._ops.OpOverloadPacket = getattr(getattr(torch.ops, namespace), short)
    return found
