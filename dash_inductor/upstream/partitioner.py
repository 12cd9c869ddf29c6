"""Makes PyTorch's min-cut partitioner treat our forward like the operator that it replaces.

The partitioner decides which values the forward saves for the backward, and which are recomputed.  It has lists of
operators that are too expensive to recompute.  With `activation_memory_budget`, it weighs their FLOPs (formulas in
`operators.flops`) against the bytes of their results.  An operator that it does not know is recomputed whenever that
saves memory.  So a node of ours stores the name of the operator that it replaces, and the partitioner looks up that
name in all of its lists: PyTorch's attention operators are in some of them, which remains PyTorch's decision.  The
node also counts with the size of the replaced one, so that a two-part log-sum-exp, or one of padded rows, does not
cause a recomputation of the forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from . import seams

_STANDS_FOR = "dash_inductor_stands_for"  # in node.meta: (operator name, bytes) of the replaced node


def stand_for(node: Node, replaced: Node) -> None:
    """Makes the partitioner treat `node` like `replaced`, a call of an operator with the same FLOPs."""
    from torch._functorch import partitioners

    target: Any = replaced.target
    name = str(target.name()) if isinstance(target, torch._ops.HigherOrderOperator) else target._schema.name
    node.meta[_STANDS_FOR] = (name, partitioners._size_of(replaced))


def install() -> None:
    """Wraps the partitioner's queries of a node's operator and size; nodes without `stand_for` are not affected."""
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
    """The operator packet of a name such as ``aten::mm``; names without a namespace are higher-order operators."""
    *namespace, short = name.split("::")
    return getattr(getattr(torch.ops, *(namespace or ["higher_order"])), short)
