"""Finds which ranks must hold a tensor with equal bits (a class of ranks) from what the program declares."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from ..upstream.parallel import composable_ddp, reduces


class Classes:
    """The class of ranks of each tensor of this rank: the ranks that must hold it with equal bits.

    Attributes:
        parted: models whose replicas differ, because each rank has updated them with its own gradients.
    """

    def __init__(self) -> None:
        self.parted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._reduced: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # by the last forward
        self._groups = WeakTensorKeyDictionary()  # ranks by parameter
        self._composable: list[weakref.ref[nn.Module]] = []
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def add(self, module: nn.Module) -> None:
        """Register a module whose forward begins; if it is a DDP model, its parameters count as replicas."""
        if module in self._known:
            return
        self._known.add(module)
        if isinstance(module, DistributedDataParallel):
            self._add(module)
        else:
            self._composable.append(weakref.ref(module))

    def begins(self, module: nn.Module) -> None:
        """Note, for a module whose forward begins, whether its gradients will be reduced."""
        if torch.is_grad_enabled() and (reduced := reduces(module)) is not None:
            self._reduced[module] = reduced

    def resolve(self) -> None:
        """Find registered models that `replicate` has turned into DDP models, which it does in their first forward."""
        for reference in self._composable:
            module = reference()
            replica = None if module is None else composable_ddp(module)
            if replica is not None:
                self._add(replica)
        self._composable.clear()

    def part(self, optimizer: torch.optim.Optimizer) -> bool:
        """Stop counting models as replicas if an optimizer is about to update them with unreduced gradients.

        Returns:
            Whether there are such models that were counted until now.
        """
        alone = [model for model, reduced in self._reduced.items() if not reduced and model not in self.parted]
        if not alone:
            return False
        self.resolve()
        stepping = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        alone = [model for model in alone if any(id(parameter) in stepping for parameter in model.parameters())]
        for model in alone:
            self.parted.add(model)
            for parameter in model.parameters():
                self._groups[parameter] = (dist.get_rank(),)
        return bool(alone)

    def holders(self, parameter: Tensor) -> tuple[int, ...]:
        """The ranks that update a parameter, or shards of it, in the same way; () if the program declares none."""
        ranks: tuple[int, ...] | None = self._groups.get(parameter)
        if ranks is None:
            return holders(parameter) if isinstance(parameter, DTensor) else ()
        return ranks

    def _add(self, replica: DistributedDataParallel) -> None:
        ranks = tuple(dist.get_process_group_ranks(replica.process_group))
        for name, parameter in replica.module.named_parameters():
            if name not in replica.parameters_to_ignore:
                self._groups[parameter] = ranks

    def of(self, parameter: Tensor, tensor: Tensor | None = None) -> tuple[int, ...]:
        """The ranks that hold a parameter, or its gradient or optimizer state, with equal bits; () if none are
        declared.

        Args:
            parameter: the parameter.
            tensor: its gradient or a tensor of its optimizer state, None for the parameter itself; a DTensor declares
                by its placements where it is replicated.
        """
        ranks = self._groups.get(parameter)
        if ranks is not None:
            found: tuple[int, ...] = ranks
            return found
        placed = tensor if isinstance(tensor, DTensor) else parameter
        if not isinstance(placed, DTensor):
            return ()
        declared = replicas(placed)
        # A mesh that is a part of the world does not say what ranks outside of it have.
        return declared if len(declared) > 1 or placed.device_mesh.size() == dist.get_world_size() else ()


def holders(tensor: DTensor) -> tuple[int, ...]:
    """The ranks that hold shards or replicas of a tensor: all ranks of its mesh, in ascending order."""
    return tuple(sorted(tensor.device_mesh.mesh.flatten().tolist()))


def replicas(tensor: DTensor) -> tuple[int, ...]:
    """The ranks that hold the same shard of a tensor as this one: those along all `Replicate` dimensions of its mesh.

    () if this rank is not in the mesh.
    """
    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if here is None:
        return ()
    place = tuple(
        slice(None) if isinstance(placement, Replicate) else coordinate
        for placement, coordinate in zip(tensor.placements, here, strict=True)
    )
    return tuple(sorted(mesh.mesh[place].flatten().tolist()))


def broadcast_buffers(module: nn.Module) -> tuple[DistributedDataParallel | None, tuple[int, ...]]:
    """The module and its ranks, if it is a DDP model whose forward broadcasts its buffers now; otherwise (None, ())."""
    if isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers():
        return module, tuple(dist.get_process_group_ranks(module.process_group))
    return None, ()
