"""Internals of PyTorch for eager code, used without importing Dynamo.

They exclude functions from compilation, find compiled modules, set flags, and query the running backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._C import _current_autograd_node, _current_graph_task_id
from torch._C import _set_deterministic_algorithms as set_deterministic_algorithms
from torch._C._autograd import _get_sequence_nr as next_sequence_number
from torch._compile import _disable_dynamo as not_compiled
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as versions_kept

__all__ = [
    "at_end_of_backward",
    "backward_node",
    "backward_number",
    "backward_sequence_number",
    "compiled_from",
    "compiler_is_loaded",
    "has_cuda_graphs",
    "in_backward",
    "is_compiled",
    "next_sequence_number",
    "not_compiled",
    "set_deterministic_algorithms",
    "versions_kept",
    "without_accumulation_hooks",
]


def compiled_from(module: nn.Module) -> nn.Module | None:
    """The original module of a module made by `torch.compile`; None for any other module."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # not imported here
    if dynamo is None or not isinstance(module, dynamo.OptimizedModule):
        return None
    original: nn.Module = module._orig_mod
    return original


def is_compiled(module: nn.Module) -> bool:
    """Whether a module, or one inside it, has been compiled by `torch.compile(module)` or `module.compile()`."""
    return any(
        compiled_from(each) is not None or getattr(each, "_compiled_call_impl", None) is not None
        for each in module.modules()
    )


def has_cuda_graphs() -> bool:
    """Whether Inductor has made CUDA graphs, whose results are valid only until the next call."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    return trees is not None and bool(getattr(trees.local, "tree_manager_containers", {}))


def compiler_is_loaded() -> bool:
    """Whether Dynamo has been imported, so that something may have been compiled."""
    return "torch._dynamo" in sys.modules


def in_backward() -> bool:
    """Whether this thread runs a backward."""
    return backward_number() != -1


def backward_number() -> int:
    """The id of the backward that this thread runs; -1 outside of a backward."""
    return _current_graph_task_id()


def at_end_of_backward(then: Callable[[], None]) -> None:
    """Calls a function when the current backward has computed all gradients, after callbacks queued before."""
    Variable._execution_engine.queue_callback(then)


def backward_node() -> str:
    """The name of the autograd node that runs on this thread; "" outside of a backward."""
    node = _current_autograd_node()
    return "" if node is None else str(node.name())


def backward_sequence_number() -> int | None:
    """The forward's sequence number of the autograd node that runs on this thread; None outside of a backward."""
    node: Any = _current_autograd_node()
    return None if node is None else int(node._sequence_nr())


@contextmanager
def without_accumulation_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """A context manager that disables the post-accumulate-grad hooks of these parameters."""
    found: list[dict[int, Any]] = [
        hooks for p in parameters if (hooks := getattr(p, "_post_accumulate_grad_hooks", None))
    ]
    kept = [dict(hooks) for hooks in found]
    for hooks in found:
        hooks.clear()  # PyTorch holds the same dictionary
    try:
        yield
    finally:
        for hooks, before in zip(found, kept, strict=True):
            hooks.update(before)
