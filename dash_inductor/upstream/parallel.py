"""Models that are parallel: what PyTorch has made of their modules, and how they communicate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from . import compat


def composable_ddp(module: nn.Module) -> DistributedDataParallel | None:
    """The replica that `replicate` has made of a module, after its first forward; None for any other module."""
    composable: Any = sys.modules.get("torch.distributed._composable.replicate")  # not imported for this question
    if composable is None or not isinstance(module, composable.DDP):
        return None
    found = getattr(composable.replicate.state(module), "_ddp", None)
    return found if isinstance(found, DistributedDataParallel) else None


def no_comm_hook(model: DistributedDataParallel) -> str:
    """Why a model reduces its gradients in a way that a hook of ours could not repeat bit for bit; "" if it could."""
    if model._comm_hooks:
        return "the program has a comm hook of its own"
    if getattr(model, "_use_python_reducer", False):
        return "its gradients are reduced by compiled code"
    if model._join_config.enable:
        return "it trains with uneven inputs"
    if any(isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse for each in model.module.modules()):
        return "it has sparse gradients"
    size = model.process_group.size()
    if model.gradient_as_bucket_view and size & (size - 1):  # it divides some of them, and multiplies others
        return f"its gradients are views of buckets, and {size} ranks are no power of two"
    return ""


def register_comm_hook(model: DistributedDataParallel, hook: Callable[[object, Any], Any]) -> None:
    """Let a hook reduce the buckets of a model from now on; the model does not know of it, and so can be pickled.

    Raises:
        RuntimeError: there is a hook already.
    """
    compat.resolve("torch.distributed", "_register_comm_hook")(model.reducer, None, hook)


def own_gather(module: FSDPModule) -> Any:
    """How a module of FSDP gathers its parameters, if PyTorch's own way is in use; None otherwise."""
    return _own(module, "_all_gather_comm", "DefaultAllGather")


def own_scatter(module: FSDPModule) -> Any:
    """How a module of FSDP reduces its gradients, if PyTorch's own way is in use; None otherwise."""
    return _own(module, "_reduce_scatter_comm", "DefaultReduceScatter")


def scatter_ranks(module: FSDPModule) -> tuple[int, ...]:
    """The ranks among which a module of FSDP reduces and scatters its gradients; () if it has no parameters."""
    found = _parameter_groups(module)
    return tuple(dist.get_process_group_ranks(found[0]._reduce_scatter_process_group)) if found else ()


def _own(module: FSDPModule, attribute: str, name: str) -> Any:
    groups = _parameter_groups(module)
    comm = getattr(groups[0], attribute, None) if len(groups) == 1 else None
    return comm if type(comm).__name__ == name and type(comm).__module__.startswith("torch.") else None


def _parameter_groups(module: FSDPModule) -> list[Any]:
    """Those that a module of FSDP gathers and scatters together; torch 2.11 has one at most."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
