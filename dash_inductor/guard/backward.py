"""A backward that leaves no trace: gradients are computed, and accumulated nowhere.

So nothing that waits behind the accumulation of a gradient runs: no reducer of DDP counts a parameter, no optimizer
steps within the backward, no hook adds to sums of the program, and `grad` of a leaf stays what it is, also of leaves
that belong to no module.  Hooks that see a gradient before it is accumulated do run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DashError
from ..upstream.eager import without_accumulation_hooks
from ..upstream.parallel import needs_accumulation, watches_leaves

_REENTRANT = "CheckpointFunctionBackward"
"""The node of a checkpoint whose backward runs a backward of its own, which accumulates."""


def differentiate(root: nn.Module, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run the backward of results of a model.

    Args:
        root: the model.
        tensors: where it begins.
        gradients: of them.

    Raises:
        DashError: reentrant checkpoints accumulate gradients, and DDP learns from that.
    """
    leaves, reentrant = _leaves(tensors)
    if not reentrant and not needs_accumulation(root):
        if leaves:
            torch.autograd.grad(tensors, leaves, gradients, allow_unused=True)
        return
    if reentrant and watches_leaves(root):
        raise DashError("reentrant checkpoints in a DDP model with static_graph or find_unused_parameters")
    with without_accumulation_hooks(leaves), _set_aside(leaves):
        torch.autograd.backward(tensors, gradients)


@contextmanager
def _set_aside(leaves: Sequence[Tensor]) -> Iterator[None]:
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        yield
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


def _leaves(tensors: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """The leaves of the graphs of results, and whether there are reentrant checkpoints in them."""
    leaves: dict[int, Tensor] = {}
    reentrant = False
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        reentrant |= node.name() == _REENTRANT
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            leaves.setdefault(id(leaf), leaf)
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)
    return list(leaves.values()), reentrant
