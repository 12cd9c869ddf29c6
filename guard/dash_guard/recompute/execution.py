"""Hashes what one forward and backward computes: results of modules, their gradients, and local gradients."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from dash_inductor.errors import described
from dash_inductor.observers import active, phases
from dash_inductor.observers.names import Names
from dash_inductor.observers.observer import Observer
from dash_inductor.upstream.dispatch import disable_current_modes
from dash_inductor.upstream.eager import not_compiled
from dash_inductor.upstream.pytree import tree_leaves

from ..fingerprints.fingerprint import description, digest, fingerprint, local, why_unseen
from ..fingerprints.lane_buffer import LaneBuffer
from ..observation.labels import called
from ..observation.modules import Modules


def zero() -> bytes:
    """The fingerprint, 16 bytes, that `Execution(silent=True)` gives to a gradient whose elements are all zero."""
    return bytes.fromhex(fingerprint(torch.zeros(1, dtype=torch.bool)))


class Digest(NamedTuple):
    """The digest of one tensor.

    Attributes:
        phase: the kind of the tensor, such as `phases.ACTIVATION`.
        tensor: its name.
        value: its fingerprint, 16 bytes.
    """

    phase: str
    tensor: str
    value: bytes

    def number(self) -> int:
        """The first half of the fingerprint as a signed 64-bit number, which process groups can send."""
        return int.from_bytes(self.value[:8], "little", signed=True)


class Execution(Observer):
    """Hashes the tensors that modules and backwards compute until `end`, in order.

    An error while hashing never reaches the program: the execution ends there and keeps the reason.

    Args:
        names: the names of modules and parameters, for all executions of a program.
        watches_graphs: whether graphs compiled meanwhile pass on the gradients of their attentions.
        turned: the first dimension of a micro-batch whose samples were shifted by one place; tensors of this size are
            hashed with their samples in the original order. 0: nothing was shifted.
        owner: hash only while this observer is active; by default, the execution itself.
        silent: the backward begins with zeros, so that all gradients must be zero; only whether they are is hashed.

    Attributes:
        begins: is called with each outermost module before it runs.
        roots: the names of the outermost modules.
        failed: why the execution has ended too early; "" if it has not.
    """

    def __init__(
        self,
        names: Names,
        watches_graphs: bool = False,
        turned: int = 0,
        owner: object | None = None,
        silent: bool = False,
    ) -> None:
        self.names, self.watches_graphs, self._turned, self._silent = names, watches_graphs, turned, silent
        self._owner = self if owner is None else owner
        self.begins: Callable[[nn.Module], object] = lambda root: None
        self.roots: list[str] = []
        self.failed = ""
        self._buffers: dict[torch.device, LaneBuffer] = {}
        self._modules = Modules(self, activations=True, local_gradients=False)
        self._lock = threading.RLock()  # hooks of the backward run on threads of autograd
        self._on = True
        self._hashed: list[tuple[str, str, str, torch.device, int]] = []  # phase, name, description, device, row
        self._digests: list[Digest] = []
        self._calls: dict[tuple[str, str], int] = {}
        self._handles: list[RemovableHandle] = []
        self._watched: set[int] = set()  # ids of parameters
        self._inside: list[Tensor] = []  # parameters as modules see them
        self._outside: list[Tensor] = []
        self._sharded = False
        self._known: set[int] = set()  # ids of modules

    def module_begins(self, module: nn.Module) -> None:
        """Put hooks on a module and its parameters if it is an outermost one that is new."""
        if id(module) not in self._known:  # an outermost one
            self._add(module)
        self._modules.enter(module)

    @not_compiled
    def _add(self, root: nn.Module) -> None:
        self.begins(root)
        self._known.update(map(id, root.modules()))
        self.names.add(root)
        self.roots.append(self.names.of_module(root))
        self._sharded |= any(isinstance(module, FSDPModule) for module in root.modules())
        for parameter in root.parameters():
            self._outside.append(parameter)
            self._watch(self.names.of_parameter(parameter), parameter)

    def module_ended(self, module: nn.Module, result: Any) -> None:
        """Hash the result of a module; for FSDP2, also put hooks on the gathered parameters, which still exist."""
        if self._sharded:
            self._watch_inside(module)
        if isinstance(module, DistributedDataParallel) and module.static_graph:
            result = None  # only in the first step it returns copies of the results of its module
        self._modules.leave(module, result)

    @not_compiled
    def _watch_inside(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in self._watched:
                self._inside.append(parameter)
                self._watch(f"{self.names.of_module(module)}.{name}", parameter)

    def returned(self, result: Any) -> None:
        """Hash the result of the outermost module again, which the program's hooks may have changed meanwhile."""
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.observe_in_step(phases.ACTIVATION, [("result", leaf) for leaf in leaves])

    def _watch(self, name: str, parameter: Tensor) -> None:
        self._watched.add(id(parameter))
        if parameter.requires_grad:
            observe = functools.partial(self._observe_gradient, name)
            self._handles.append(parameter.register_hook(observe))

    def _observe_gradient(self, name: str, gradient: Tensor) -> None:
        self.observe_in_step(phases.LOCAL_GRADIENT, [(name, gradient)])

    def attention_gradients(self, gradients: Sequence[tuple[str, Tensor]]) -> None:
        """Hash the gradients of one attention in a compiled graph, given as (name, gradient) pairs."""
        self.observe_in_step(phases.ATTENTION_GRADIENT, gradients)

    def is_on(self) -> bool:
        """Whether tensors are hashed now: the execution has not ended, and its owner is an active observer."""
        return self._on and active.is_on(self._owner)

    def replicate(self, model: DistributedDataParallel) -> None:
        """Ignores the event, because it does not matter here that other ranks have equal parameters."""

    def training_begins(self) -> None:
        """Ignores the event, because a second run begins with the state of the first one."""

    def place(self) -> int:
        """The index that the next digest gets."""
        return len(self._hashed)

    def prepare(self, device: torch.device) -> None:
        """Allocate the buffer for the hashes of tensors on a device, unless it exists."""
        with self._lock:
            if device not in self._buffers:
                with disable_current_modes(), torch.inference_mode(False):
                    self._buffers[device] = LaneBuffer(device)

    def observe_in_step(self, phase: str, tensors: Sequence[tuple[str, Tensor]], place: int | None = None) -> None:
        """Hash tensors, given as (name, tensor) pairs; skips inputs of modules, and tensors that cannot be hashed."""
        if phase == phases.INPUT or not self.is_on() or (self._silent and phase == phases.ACTIVATION):
            return
        try:
            self._observe(phase, tensors)
        except Exception as error:
            self.failed = self.failed or described(error)
            self._on = False

    def _observe(self, phase: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
        with self._lock, disable_current_modes():
            for name, tensor in tensors:
                plain = local(tensor)
                if why_unseen(plain):
                    continue
                if self._silent:
                    plain = plain.detach().ne(0).any().view(1)
                if self._turned and plain.dim() and plain.shape[0] == self._turned:
                    plain = plain.detach().roll(-1, 0)
                self.prepare(plain.device)
                buffer = self._buffers[plain.device]
                if not buffer.free():
                    self._collect()
                (row,) = buffer.add([plain])
                calls = self._calls[phase, name] = self._calls.get((phase, name), 0) + 1
                self._hashed.append((phase, called(name, calls), description(plain), plain.device, row))

    def module(self) -> str:
        """The name of the innermost module that runs on this thread, "" for none."""
        return self._modules.innermost()

    def detach(self) -> None:
        """Remove the hooks on parameters, so that their gradients are no longer hashed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end(self) -> list[Digest]:
        """Remove hooks, wait for the device, and return the digests of all hashed tensors in order."""
        self._on = False
        self.detach()
        self._modules.remove()
        with self._lock:
            self._collect()
        return self._digests

    def has(self, phase: str) -> bool:
        """Whether any tensor of a phase, such as `phases.ACTIVATION`, was hashed."""
        return any(hashed == phase for hashed, _ in self._calls)

    def work(self) -> str:
        """Which shards this rank computes if modules are split over ranks, as text; "" if all ranks compute everything.

        Ranks with the same text compute the same results from the same inputs.
        """
        parts = set()
        for parameter in self._inside if self._sharded else self._outside:
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                parts |= {
                    f"{mesh.get_local_rank(dimension)} of {mesh.size(dimension)}"
                    for dimension, placement in enumerate(parameter.placements)
                    if not isinstance(placement, Replicate)
                }
        return ", ".join(sorted(parts))

    def _collect(self) -> None:
        rows = {device: buffer.take() for device, buffer in self._buffers.items()}
        values = {device: wait() for device, wait in rows.items()}
        for phase, label, what, device, row in self._hashed:
            low, high = values[device][row]
            self._digests.append(Digest(phase, label, digest(low, high, what)))
        self._hashed.clear()
