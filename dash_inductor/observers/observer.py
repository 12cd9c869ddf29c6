"""An observer watches a training run: an object that gets its events, and changes nothing of it."""

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
    """The tensors that a recording has seen in one phase of a step, for observers beside it.

    Attributes:
        phase: one of `phases.STAGES`.
        parameters: the parameters that the phase is about, by name.
        lanes: names and their lanes, int64 [names, 2] on the device, of the tensors of these that could be hashed.
        failed: whether this rank has nothing to show any more, though others wait for it.
    """

    phase: str
    parameters: Sequence[tuple[str, Tensor]]
    lanes: Sequence[tuple[list[str], Tensor]]
    failed: bool = False


class Observer:
    """Gets the events of a training run while it is among `active.observers`; each does nothing by default.

    Modules and optimizers tell theirs in eager code only (`hooks`).  A recording tells other observers of its steps.

    Attributes:
        watches_graphs: whether graphs that are compiled meanwhile show their gradients of attention (`in_graphs`).
        phases: the phases of a recorded step that a recording shows to it (`seen`): those of parameters.
    """

    watches_graphs = False
    phases: frozenset[str] = frozenset()

    def module_begins(self, module: nn.Module) -> None:
        """The forward of a module begins."""

    def module_ended(self, module: nn.Module, result: Any) -> None:
        """The forward of a module has ended, or has raised an exception: `result` is None then."""

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""

    def scaler_updated(self) -> None:
        """A scaler of losses ends a step; if no optimizer has stepped in it, gradients have overflowed."""

    def prepare(self, device: torch.device) -> None:
        """A graph that shows gradients on this device is being compiled; memory may be allocated for it."""

    def attention_gradients(self, gradients: Sequence[tuple[str, Tensor]]) -> None:
        """A compiled graph has computed gradients of one attention, by name; they are valid during the call only.

        A CUDA graph calls nobody: the hashes of its gradients are in `in_graphs.journals`.
        """

    def replicated(self, model: DistributedDataParallel) -> None:
        """A model begins whose parameters are equal on all ranks of its process group."""

    def seen(self, event: Seen) -> None:
        """A recording has seen a phase of `phases`."""

    def step_ended(self, step: int) -> None:
        """An optimizer has stepped in a recorded step, and all of its phases have been seen."""

    def check(self) -> None:
        """A recorded step of an optimizer is about to begin, or a recording is about to end.

        Raises:
            Exception: what must end the training run.
        """

    def close(self) -> None:
        """It will see nothing more."""
