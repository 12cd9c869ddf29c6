"""Detects graphs whose tensors are only read by kernels on their own device.

Zeros without memory (`upstream.zero_pages`) are addresses that only one device may read.  Other readers need ordinary
memory: a copy to another GPU, which that GPU may perform; NCCL, which registers the buffers that it sends; symmetric
memory, whose handles go to other processes; and whatever an operator of a program does with an address.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..upstream.dispatch import HigherOrderOperator, OpOverload
from ..upstream.inductor import is_generated
from ..upstream.pytree import tree_leaves
from .fully_written import NESTING, PYTHON, WRITTEN, WRITTEN_IF

OURS = frozenset({"dash_inductor", "inductor", "inductor_prims", "rngprims"})
"""Namespaces whose operators are kernels; those of collectives are excluded."""
OTHERS = frozenset({"observe", "_local_scalar_dense"})
"""Operators that pass their tensors to Python."""
KERNELS = frozenset({"triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation"})
"""Higher-order operators that run a program's own kernels."""


def stays_on_its_device(gm: GraphModule) -> bool:
    """Return whether all operators of a graph and its subgraphs are kernels that compute on the device of their inputs.

    These are kernels of Inductor, PyTorch or this package; CPU scalars may be read on any device.  Return False if the
    device of a tensor is unknown.
    """
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    return all(_stays(node) for graph in graphs for node in graph.nodes if node.op == "call_function")


def _stays(node: Node) -> bool:
    target: object = node.target
    if isinstance(target, OpOverload):
        if not _is_kernel(target):
            return False
    elif isinstance(target, HigherOrderOperator):
        if target.name() not in NESTING - KERNELS:
            return False
    elif getattr(target, "__module__", "") not in PYTHON:
        return False
    sources = [node for node in node.all_input_nodes if not _is_graph(node)]
    if any("val" not in each.meta for each in (node, *sources)):
        return False
    own, given = _tensors(node), [tensor for source in sources for tensor in _tensors(source)]
    devices = {tensor.device for tensor in own}
    read = {tensor.device for tensor in given if tensor.device.type != "cpu" or tensor.dim()}
    return not devices or not read or devices == read


def _is_kernel(operator: OpOverload) -> bool:
    namespace, name = operator._schema.name.split("::")
    if name in OTHERS:
        return False
    return namespace in OURS or (namespace == "aten" and name in (*WRITTEN, *WRITTEN_IF)) or is_generated(operator)


def _is_graph(node: Node) -> bool:
    """Return whether a node is a subgraph that a higher-order operator runs."""
    owner = node.graph.owning_module
    return node.op == "get_attr" and isinstance(getattr(owner, str(node.target), None), GraphModule)


def _tensors(node: Node) -> list[torch.Tensor]:
    value: Any = node.meta["val"]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
