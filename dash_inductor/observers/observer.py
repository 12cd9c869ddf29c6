"""An observer watches a training run: an object that gets its events, and changes nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Observer:
    """Gets the events of a training run while it is among `active.observers`; each does nothing by default.

    Modules and optimizers tell theirs in eager code only (`hooks`).

    Attributes:
        watches_graphs: whether graphs that are compiled meanwhile show their gradients of attention (`in_graphs`).
    """

    watches_graphs = False

    def module_begins(self, module: nn.Module) -> None:
        """The forward of a module begins."""

    def module_ended(self, module: nn.Module, result: Any) -> None:
        """The forward of a module has ended, or has raised an exception: `result` is None then."""

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""

    def prepare(self, device: torch.device) -> None:
        """A graph that shows gradients on this device is being compiled; memory may be allocated for it."""

    def attention_gradients(self, gradients: Sequence[tuple[str, Tensor]]) -> None:
        """A compiled graph has computed gradients of one attention, by name; they are valid during the call only.

        A CUDA graph calls nobody: the hashes of its gradients are in `in_graphs.journals`.
        """
