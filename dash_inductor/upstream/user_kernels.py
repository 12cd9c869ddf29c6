"""Graph nodes that launch a program's own Triton kernels.  Imports Triton if it is installed."""

from __future__ import annotations

from typing import Any

from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch.fx import Node

_LAUNCHES = (triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation)


def is_launch(node: Node) -> bool:
    """Whether a node launches a Triton kernel of the program."""
    return node.target in _LAUNCHES


def name_of(node: Node) -> str:
    """The name of the Python function of the Triton kernel that a node launches."""
    kernel = _kernel(node)
    while hasattr(kernel, "fn") and not isinstance(getattr(kernel, "__name__", None), str):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", kernel))


def configurations(node: Node) -> list[str]:
    """The ``@triton.autotune`` configurations of the kernel that a node launches, as text; empty without autotuning."""
    return [str(config) for config in getattr(_kernel(node), "configs", [])]


def _kernel(node: Node) -> Any:
    index: Any = node.kwargs["kernel_idx"]
    return kernel_side_table.get_kernel(index)
