"""Deterministic training with Lightning's Trainer: `DeterministicCallback`."""

from __future__ import annotations

import logging

from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.fabric.utilities.seed import reset_seed

from ..observers.log import Log
from ..upstream.eager import is_compiled
from .training import DeterministicTraining, Folder, with_shared_arguments

_log = logging.getLogger("lightning.pytorch.dash_inductor")


@with_shared_arguments
class DeterministicCallback(Callback):  # type: ignore[misc]  # mypy does not follow lightning
    """Makes `Trainer.fit` deterministic, and says what became of the attention.

        trainer = Trainer(callbacks=[DeterministicCallback(seed=0, compile=True)])
        trainer.fit(model)

    When it is made, it calls Lightning's `seed_everything`, data-loader workers included, and sets
    `CUBLAS_WORKSPACE_CONFIG` if the environment does not: make it before the model.  When fitting begins, it seeds
    again, switches PyTorch's deterministic algorithms on, and says if the variable was set too late.  After the first
    step, it logs how many attentions were replaced and what was not.  When fitting ends, also by an exception, the
    flag is as it was before.

    With ``Trainer(deterministic="warn")`` the flag stays so that PyTorch warns, and a message names the operators that
    are not deterministic in the first step.

    Args:
        seed: for all generators; by default the one of an earlier `seed_everything`, else 0.
        compile: compile the module's forward and its submodules that have parameters, by `torch.nn.Module.compile`, if
            nothing in it is compiled already.  Its steps are not compiled, because `self.log` in them cannot be; with
            strategies of several ranks, which call steps in the place of the forward, they are, but for `self.log`.
        strict, record, guard, log_to: as of `DeterministicTraining`, which also says what is raised.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        compile: bool = False,
        strict: bool = False,
        record: Folder | None = None,
        guard: Folder | None = None,
        log_to: Log | None = None,
    ) -> None:
        by = "DeterministicCallback(compile=True)"
        self._training = DeterministicTraining(_log, by, strict=strict, record=record, guard=guard, log_to=log_to)
        self._compile = compile
        seed_everything(seed, workers=True)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Seeds, puts the settings in force, and compiles, before `fit` moves the module to its device."""
        if stage != "fit":
            return
        reset_seed()
        self._training.begin()
        if self._compile and not is_compiled(pl_module):
            for module in (pl_module, *pl_module.children()):
                if any(True for _ in module.parameters()):
                    module.compile()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the settings; the module stays compiled."""
        self._training.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restores the settings after an exception in `fit`."""
        self._training.end()
