"""Deterministic training with Lightning's Trainer: `DeterministicCallback`."""

from __future__ import annotations

import logging

from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.fabric.utilities.seed import reset_seed

from ..observers.log import Log
from ..upstream.eager import is_compiled
from ._training import DeterministicTraining, Folder

_log = logging.getLogger("lightning.pytorch.dash_inductor")


class DeterministicCallback(Callback):  # type: ignore[misc]  # mypy does not follow lightning
    """Makes `Trainer.fit` deterministic, and says what became of the attention.

        trainer = Trainer(callbacks=[DeterministicCallback(seed=0, compile=True)])
        trainer.fit(model)

    When it is made, it calls Lightning's `seed_everything`, data-loader workers included, and sets
    `CUBLAS_WORKSPACE_CONFIG` if the environment does not: make it before the model.  When fitting begins, it seeds
    again, switches PyTorch's deterministic algorithms on, and says if the variable was set too late.  After the first
    step, it logs how many attentions were replaced and what was kept.  When fitting ends, also by an exception, the
    flag is as it was before.

    With ``Trainer(deterministic="warn")`` the flag stays so that PyTorch warns, and a message names the operators that
    are not deterministic in the first step.

    Args:
        seed: for all generators; by default the one of an earlier `seed_everything`, else 0.
        compile: compile the module's forward and its submodules that have parameters, by `torch.nn.Module.compile`, if
            nothing in it is compiled already.  Its steps are not compiled, because `self.log` in them cannot be.
        strict: an attention that is not replaced, or a first step without compiled attention, is a `FallbackError`.
        record: a folder for fingerprints of the training, as of `dash_guard.record`.
        guard: a folder for findings about its ranks, as of `dash_guard.guard`.
        log_to: a logger of `dash_inductor.integrations` for W&B, TensorBoard or MLflow, which gets the records as a
            table, with `record` digests of each step, and with `guard` findings as alerts.

    Raises:
        MissingPackageError: `record` or `guard` is given, and dash_guard is not installed.
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
