"""The base class of observers: objects that get the events of a training run without changing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Seen:
    """An event: a recording has hashed the tensors of one phase of a step; other observers may use the hashes.

    Attributes:
        phase: one of `phases.STAGES`.
        parameters: the parameters of the phase, by name.
        lanes: pairs of tensor names and their hashes (two 64-bit lanes each), int64 [names, 2] on the device, for those
            tensors that could be hashed.
        failed: whether this rank can contribute nothing more although other ranks wait for it.
    """

    phase: str
    parameters: Sequence[tuple[str, Tensor]]
    lanes: Sequence[tuple[list[str], Tensor]]
    failed: bool = False


class Observer:
    """Gets the events of a training run while it is in `active.observers`; by default, each event does nothing.

    Modules and optimizers send events in eager code only (`hooks`).  A recording, an observer that hashes the tensors
    of each step, sends the events `seen`, `step_ended` and `check` to the other observers.

    Attributes:
        watches_graphs: whether graphs compiled meanwhile pass their attention gradients to it (`in_graphs`).
        phases: for which phases of a recorded step a recording calls `seen`; only phases that hash parameters or their
            gradients are possible.
    """

    watches_graphs = False
    phases: frozenset[str] = frozenset()

    def module_begins(self, module: nn.Module) -> None:
        """Called when the forward of a module begins."""

    def module_ended(self, module: nn.Module, result: Any) -> None:
        """Called when the forward of a module has ended; `result` is None if it has raised an exception."""

    def loss_scaled(self, loss: Tensor, scaled: Tensor) -> None:
        """Called when a `GradScaler` has multiplied a loss by its scale."""

    def backward_begins(self, tensors: Sequence[Tensor]) -> None:
        """Called before a backward that begins at these tensors, and is given no gradients of them.

        A backward inside of another one, as of a checkpoint, is no event.
        """

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer steps, with complete gradients: if it gets a closure, after its first call."""

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer has stepped."""

    def scaler_updates(self, scaler: torch.amp.GradScaler) -> None:
        """Called before a `GradScaler` ends a step: it still has the scale of the step."""

    def scaler_updated(self) -> None:
        """Called when a `GradScaler` ends a step; if no optimizer has stepped in it, gradients have overflowed."""

    def prepare(self, device: torch.device) -> None:
        """Called when a graph that passes gradients on `device` to observers is compiled; may allocate memory."""

    def attention_gradients(self, gradients: Sequence[tuple[str, Tensor]]) -> None:
        """Called when a compiled graph has computed the gradients of one attention, given by name.

        The gradients are valid only during the call.  A CUDA graph cannot call this method: the hashes of its gradients
        are in `in_graphs.journals`.
        """

    def replicated(self, model: DistributedDataParallel) -> None:
        """Called when the forward of a DDP model begins.

        The model's parameters are equal on all ranks of its process group.
        """

    def seen(self, event: Seen) -> None:
        """Called when a recording has hashed the tensors of a phase that is in the attribute `phases`."""

    def step_ended(self, step: int) -> None:
        """Called when an optimizer has stepped in a recorded step, and all phases of the step have been hashed."""

    def check(self) -> None:
        """Called before a recorded optimizer step, and before a recording ends.

        Raises:
            Exception: an error that must end the training run.
        """

    def close(self) -> None:
        """Called when the observer is closed; it gets no more events."""
