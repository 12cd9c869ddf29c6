"""Deterministic training with the Trainer of transformers, and with the trainers of TRL: `DeterministicCallback`."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
from transformers.utils.logging import get_logger

from ..observers.log import Log
from .training import DeterministicTraining, Folder, with_shared_arguments

_log = get_logger("transformers.dash_inductor")
_FULL_DETERMINISM = (
    "dash_inductor: full_determinism=True does not reach weights that are drawn before Trainer(...) is called, kernels "
    "that are chosen by timing (torch_compile_mode='max-autotune'), the order in which NCCL adds, and kernels of other "
    "packages. It sets CUDA_LAUNCH_BLOCKING=1, so that the host waits for every kernel, which determinism does not "
    "need: leave it out beside this callback."
)


@with_shared_arguments
class DeterministicCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Makes the training of a `Trainer` deterministic, and says what became of its attention.

        args = TrainingArguments(..., torch_compile=True)
        trainer = Trainer(model, args, callbacks=[DeterministicCallback()])

    When it is made, it sets `CUBLAS_WORKSPACE_CONFIG` if the environment does not, so make it before the model is moved
    to a GPU; it says when training begins if it was too late.  When training begins, it switches PyTorch's
    deterministic algorithms on and seeds all generators with `TrainingArguments.seed`; a checkpoint that is resumed
    restores their states after that.  After the first step, it logs how many attentions were replaced and what was
    not.  When training ends, the flag is as it was before.

    Messages go to the logger of transformers: those about something that is not replaced or not deterministic as
    warnings, others with ``log_level="info"``.  `Trainer` tells callbacks of no exception: after one, the settings stay
    until the callback's next training, or until `end`.

    Args:
        strict, record, guard, log_to: as of `DeterministicTraining`, which also says what is raised.
    """

    def __init__(
        self,
        *,
        strict: bool = False,
        record: Folder | None = None,
        guard: Folder | None = None,
        log_to: Log | None = None,
    ) -> None:
        by = "TrainingArguments(torch_compile=True)"
        self._training = DeterministicTraining(_log, by, strict=strict, record=record, guard=guard, log_to=log_to)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Puts the settings in force, and seeds."""
        if args.full_determinism and state.is_world_process_zero:
            _log.log(logging.WARNING, _FULL_DETERMINISM)
        set_seed(args.seed)
        self._training.begin()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restores the settings."""
        self.end()

    def end(self) -> None:
        """Restores the settings after a training that an exception has ended."""
        self._training.end()
