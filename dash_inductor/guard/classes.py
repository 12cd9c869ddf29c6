"""Which ranks must have equal bits of a tensor: a class of ranks, by what the program has declared."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from ..upstream.parallel import composable_ddp


class Classes:
    """The classes of this rank's tensors."""

    def __init__(self) -> None:
        self._groups = WeakTensorKeyDictionary()  # ranks by parameter
        self._composable: list[weakref.ref[nn.Module]] = []
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def add(self, module: nn.Module) -> None:
        """A module begins its forward: if it has replicas, so have its parameters."""
        if module in self._known:
            return
        self._known.add(module)
        if isinstance(module, DistributedDataParallel):
            self._add(module)
        else:
            self._composable.append(weakref.ref(module))

    def resolve(self) -> None:
        """Ask modules that have begun whether they are replicas: `replicate` makes them so in their first forward."""
        for reference in self._composable:
            module = reference()
            replica = None if module is None else composable_ddp(module)
            if replica is not None:
                self._add(replica)
        self._composable.clear()

    def _add(self, replica: DistributedDataParallel) -> None:
        ranks = tuple(dist.get_process_group_ranks(replica.process_group))
        for name, parameter in replica.module.named_parameters():
            if name not in replica.parameters_to_ignore:
                self._groups[parameter] = ranks

    def of(self, parameter: Tensor, tensor: Tensor | None = None) -> tuple[int, ...]:
        """The ranks that have equal bits of something that belongs to a parameter; () if that is not declared.

        Args:
            tensor: the gradient or a state of it; a DTensor says itself where it is replicated.
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


def replicas(tensor: DTensor) -> tuple[int, ...]:
    """The ranks that hold the same part of a tensor as this one: those along all `Replicate` dimensions of its mesh."""
    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if here is None:
        return ()
    place = tuple(
        slice(None) if isinstance(placement, Replicate) else coordinate
        for placement, coordinate in zip(tensor.placements, here, strict=True)
    )
    return tuple(sorted(mesh.mesh[place].flatten().tolist()))


def broadcast_buffers(module: nn.Module) -> tuple[DistributedDataParallel | None, tuple[int, ...]]:
    """The model of DDP that has just broadcast its buffers, and its ranks; (None, ()) for any other module."""
    if isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers():
        return module, tuple(dist.get_process_group_ranks(module.process_group))
    return None, ()
