"""PyTorch's partitioner takes a forward of ours for the operator that it stands in the place of.

The partitioner decides which values the forward saves for the backward, and which are computed again.  It knows a few
operators by name as too expensive for a second run, unless `activation_memory_budget` asks for one; then it weighs
their FLOPs (`operators.flops` has formulas) against the bytes of their results.  An operator that it does not know is
run again wherever a byte can be saved.  So a node of ours carries the name of the operator that it replaces, and the
partitioner looks that name up in all of its lists: PyTorch's attention is in some of them and not in others, and this
choice is PyTorch's own.  The node weighs what the other one did: a log-sum-exp of two parts, or one of rows, is no
reason to run a forward again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from . import seams

_STANDS_FOR = "dash_inductor_stands_for"  # in a node's metadata: (name, bytes) of the node in whose place it is


def stand_for(node: Node, replaced: Node) -> None:
    """Let the partitioner take `node` for `replaced`, a call of an operator with as many FLOPs."""
    from torch._functorch import partitioners

    target: Any = replaced.target
    name = str(target.name()) if isinstance(target, torch._ops.HigherOrderOperator) else target._schema.name
    node.meta[_STANDS_FOR] = (name, partitioners._size_of(replaced))


def install() -> None:
    """Make the partitioner look at what a node stands for.  It looks at all other nodes as ever."""
    seams.PARTITIONED_TARGET.wrap(_target)
    seams.PARTITIONED_SIZE.wrap(_size)


def _target(plain: Callable[..., Any]) -> Callable[..., Any]:
    def target(node: Node) -> Any:
        found = node.meta.get(_STANDS_FOR)
        return plain(node) if found is None else _operator(found[0])

    return target


def _size(plain: Callable[..., Any]) -> Callable[..., Any]:
    def size(node: Node) -> Any:
        found = node.meta.get(_STANDS_FOR)
        return plain(node) if found is None else found[1]

    return size


@functools.cache
def _operator(name: str) -> Any:
    """The operator of this name, without its overload; a higher-order one has a name without a namespace."""
    *namespace, short = name.split("::")
    return getattr(getattr(torch.ops, *(namespace or ["higher_order"])), short)
