"""Models under DDP, `replicate` and FSDP: how PyTorch wraps their modules, and how they communicate."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from dash_inductor.errors import described
from dash_inductor.upstream import compat


def composable_ddp(module: nn.Module) -> DistributedDataParallel | None:
    """The DDP model that `replicate` has made of a module in its first forward; None for any other module."""
    found = getattr(_replicate_state(module), "_ddp", None)
    return found if isinstance(found, DistributedDataParallel) else None


def _replicate_state(module: nn.Module) -> Any:
    """What `replicate` keeps of a module, None for any other module."""
    composable: Any = sys.modules.get("torch.distributed._composable.replicate")  # not imported for this question
    return None if composable is None or not isinstance(module, composable.DDP) else composable.replicate.state(module)


def broadcasts_next(root: nn.Module) -> bool:
    """Whether the next forward of a model broadcasts its parameters, as the first one of `replicate` does."""
    return any(_replicate_state(m) is not None and composable_ddp(m) is None for m in root.modules())


class _NoReducer:
    """Replaces DDP's reducer while a model runs again: rebuilds no bucket and reduces nothing."""

    def _rebuild_buckets(self) -> bool:
        return False


@contextmanager
def not_reduced(module: nn.Module) -> Iterator[None]:
    """A context manager in which a DDP model, or one of `replicate`, runs without its reducer.

    A forward makes DDP rebuild its buckets, once, after the first backward.  Gradients that are views of buckets then
    become views of the new ones; those that are not in their places just then would stay views of the old ones, and
    DDP would multiply them where it had divided them.  The first backward of a static graph ends with a reduction of
    all that it has seen: a forward here must not ask for it.
    """
    model = module if isinstance(module, DistributedDataParallel) else composable_ddp(module)
    if model is None:
        yield
        return
    with ExitStack() as stack:
        for owner, name, value in (
            (model, "reducer", _NoReducer()),
            (model, "require_backward_grad_sync", False),
            (model, "require_forward_param_sync", model.require_forward_param_sync),
            *([] if model is module else [(_replicate_state(module), "_no_sync", True)]),
            *([(model, "_static_graph_delay_allreduce_enqueued", True)] if model.static_graph else []),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def why_not_again(root: nn.Module) -> str:
    """Why a model cannot run again without an effect on training; "" if it can."""
    for model in ddp_models(root):
        if model._delay_all_reduce_params:
            return "DDP reduces gradients late (delay_all_reduce_named_params)"
        if model.mixed_precision is not None:
            return "DDP casts parameters (mixed_precision)"
    return ""


def is_gathered(root: nn.Module) -> bool:
    """Whether FSDP2 has gathered parameters of a model now, as between a forward and its backward."""
    return any(
        group.is_unsharded
        for module in root.modules()
        if isinstance(module, FSDPModule)
        for group in _parameter_groups(module)
    )


def needs_accumulation(root: nn.Module) -> bool:
    """Whether a backward of a model only works if gradients are accumulated: FSDP1 reduces them only then."""
    return any(isinstance(module, FullyShardedDataParallel) for module in root.modules())


def watches_leaves(root: nn.Module) -> bool:
    """Whether DDP finds out by gradient hooks which parameters are used, also in backwards that reduce nothing."""
    return any(model.find_unused_parameters or model.static_graph for model in ddp_models(root))


def ddp_models(root: nn.Module) -> list[DistributedDataParallel]:
    """The DDP models inside a model, including those made by `replicate`."""
    models = (m if isinstance(m, DistributedDataParallel) else composable_ddp(m) for m in root.modules())
    return [model for model in models if model is not None]


def reduces(module: nn.Module) -> bool | None:
    """Whether the gradients of a forward that begins now are reduced; None if the module is not DDP or `replicate`."""
    if isinstance(module, DistributedDataParallel):
        return bool(module.require_backward_grad_sync)
    state = _replicate_state(module)
    return None if state is None else not state._no_sync


def has_uneven_inputs(module: nn.Module) -> bool:
    """Whether a DDP model trains within DDP's `join`, so that ranks may make different numbers of steps."""
    return isinstance(module, DistributedDataParallel) and bool(module._join_config.enable)


def no_comm_hook(model: DistributedDataParallel) -> str:
    """Why a communication hook could not reduce a DDP model's gradients bit for bit as DDP does; "" if it could."""
    if model._comm_hooks:
        return "the program has its own communication hook"
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
    """Make a hook reduce the buckets of a DDP model; the model has no reference to it, so that it can be pickled.

    Raises:
        RuntimeError: the model has a hook already.
    """
    compat.resolve("torch.distributed", "_register_comm_hook")(model.reducer, None, hook)


def own_gather(module: FSDPModule) -> Any:
    """The object with which an FSDP2 module gathers its parameters, if it is PyTorch's default one; otherwise None."""
    return _own(module, "_all_gather_comm", "DefaultAllGather")


def own_scatter(module: FSDPModule) -> Any:
    """The object with which an FSDP2 module reduces its gradients, if it is PyTorch's default one; otherwise None."""
    return _own(module, "_reduce_scatter_comm", "DefaultReduceScatter")


def scatter_ranks(module: FSDPModule) -> tuple[int, ...]:
    """The ranks among which an FSDP2 module reduces and scatters its gradients; () if there are no others."""
    found = _parameter_groups(module)
    if not found or getattr(found[0].mesh_info, "shard_mesh_size", 1) < 2:
        return ()
    return tuple(dist.get_process_group_ranks(found[0]._reduce_scatter_process_group))


def reduce_ranks(module: FSDPModule) -> tuple[int, ...]:
    """The ranks of the all-reduce by which HSDP sums a module's reduce-scattered gradients; () if there is none."""
    group = reduce_group(module) if scatter_ranks(module) else None
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def reduce_group(module: FSDPModule) -> dist.ProcessGroup | None:
    """The process group of an HSDP module's `all_reduce`; None if there is none, or more than one."""
    found = _parameter_groups(module)
    return getattr(found[0].mesh_info, "replicate_process_group", None) if len(found) == 1 else None


def reduce_op(module: FSDPModule, dtype: torch.dtype, device: torch.device) -> Any:
    """The reduction operation of an HSDP module's `all_reduce` for gradients of a dtype, as PyTorch chooses it."""
    (group,) = _parameter_groups(module)
    factors = compat.resolve("torch.distributed.fsdp._fully_shard._fsdp_collectives", "_get_gradient_divide_factors")
    return factors(
        group._reduce_scatter_process_group, reduce_group(module), dtype, device.type,
        group.gradient_divide_factor, group.force_sum_reduction_for_comms,
    )[3]  # fmt: skip


def no_reduce_hook(module: FSDPModule) -> str:
    """Why the `all_reduce` of an HSDP module cannot be repeated bit for bit; "" if it can."""
    if any(getattr(group, "_all_reduce_hook", None) is not None for group in _parameter_groups(module)):
        return "the program has its own hook for it"
    if own_scatter(module) is None:
        return "the program has its own communication to reduce"
    try:
        reduce_op(module, torch.float32, torch.device("cpu"))
    except Exception as error:  # another version of PyTorch
        return f"how it sums is not known: {described(error)}"
    return ""


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
