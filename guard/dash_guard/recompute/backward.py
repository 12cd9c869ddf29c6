"""A backward that leaves no trace: it computes gradients, but does not accumulate them.

So nothing that follows the accumulation of a gradient runs: no reducer of DDP counts a parameter, no optimizer steps
within the backward, no hook adds to sums of the program, and `grad` of a leaf stays the same, also for leaves that
belong to no module. Hooks that see a gradient before it is accumulated do run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dash_inductor.errors import DashError
from dash_inductor.upstream.eager import in_backward, without_accumulation_hooks

from ..upstream.parallel import ddp_models, needs_accumulation, watches_leaves

_REENTRANT = "CheckpointFunctionBackward"
"""The name of the node of a checkpoint whose backward runs an inner backward, which accumulates."""

_EDGE: Any = torch.autograd.graph.GradientEdge


def differentiate(root: nn.Module, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run the backward of a model's results without accumulating gradients; they are seen only by hooks.

    Args:
        root: the model.
        tensors: the results at which the backward begins.
        gradients: the gradients of these results.

    Raises:
        DashError: the model has reentrant checkpoints, which accumulate gradients, in a DDP model that counts them.
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
def traceless(roots: Sequence[nn.Module]) -> Iterator[None]:
    """A context manager in which backwards of this thread compute the same gradients without reaching a reducer.

    Leaves get their gradients after the backward; on exit, the gradients from before are restored. Parameters that are
    in no model, such as those that FSDP2 has gathered, get none.

    Args:
        roots: the models; the list may grow inside the context.

    A backward inside raises:
        DashError: the model has reentrant checkpoints in a DDP model, which may wait for accumulated gradients.
    """
    original, thread = torch.autograd.backward, threading.get_ident()
    before: dict[int, tuple[Tensor, Tensor | None]] = {}

    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        ends, given = _several(tensors), grad_variables if grad_tensors is None else grad_tensors
        if threading.get_ident() != thread or in_backward() or any(map(needs_accumulation, roots)):
            return original(tensors, given, retain_graph, create_graph, inputs=inputs)
        leaves, reentrant = _leaves(ends)
        if reentrant and any(map(ddp_models, roots)):
            raise DashError("reentrant checkpoints in a DDP model, within a function of the program's own")
        if inputs is not None:
            leaves = _several(inputs)
        plain = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for leaf in plain:
            before.setdefault(id(leaf), (leaf, leaf.grad))
        if reentrant or not leaves:
            return original(tensors, given, retain_graph, create_graph, inputs=inputs)
        gradients = torch.autograd.grad(ends, leaves, given, retain_graph, create_graph, allow_unused=True)
        known = {id(parameter) for root in roots for parameter in root.parameters()}
        for leaf, gradient in zip(leaves, gradients, strict=True):
            gathered = isinstance(leaf, nn.Parameter) and id(leaf) not in known
            if gradient is not None and isinstance(leaf, Tensor) and not gathered:
                leaf.grad = gradient.clone() if leaf.grad is None else leaf.grad + gradient

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original
        for leaf, gradient in before.values():
            leaf.grad = gradient


def _several(given: Any) -> list[Any]:
    """The arguments of a backward as a list of tensors or edges of the graph."""
    if isinstance(given, (Tensor, _EDGE)):
        return [given]
    return list(given.values() if isinstance(given, dict) else given)


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


def _leaves(ends: Sequence[Any]) -> tuple[list[Any], bool]:
    """The leaves of the graphs of results or edges, and whether these graphs contain reentrant checkpoints."""
    leaves: dict[int, Any] = {id(end): end for end in ends if isinstance(end, Tensor) and end.grad_fn is None}
    reentrant = False
    nodes: list[Any] = [end.node if isinstance(end, _EDGE) else end.grad_fn for end in ends]
    nodes = [node for node in nodes if node is not None]
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
