"""Deterministic training with Accelerate: `DeterministicTracker`."""

from __future__ import annotations

import atexit

from accelerate.logging import get_logger
from accelerate.tracking import GeneralTracker
from accelerate.utils import set_seed

from ..observers.log import Log
from .training import DeterministicTraining, Folder, is_first_rank, with_shared_arguments

_log = get_logger("accelerate.dash_inductor").logger  # which, unlike the adapter around it, needs no Accelerator
_unfinished: list[DeterministicTraining] = []


@with_shared_arguments
class DeterministicTracker(GeneralTracker):  # type: ignore[misc]  # mypy does not follow accelerate
    """Makes the training until `end_training` deterministic, and says what became of attention.

        accelerator = Accelerator(dynamo_backend="inductor", log_with=DeterministicTracker(seed=0))
        accelerator.init_trackers("run")

    When it is made, before the accelerator and the model, it seeds all generators, alike on all ranks, sets
    `CUBLAS_WORKSPACE_CONFIG` if the environment does not, switches PyTorch's deterministic algorithms on, and says if
    the variable was set too late.  After the first step of an optimizer, it logs how many attentions were replaced and
    what was not.  `end_training` restores the flag on the main process: Accelerate has trackers on no other.  Other
    ranks keep the settings until their next tracker is made, or until they exit; `finish` restores them there, too.

    It tracks no values, and goes with other trackers: ``log_with=["tensorboard", DeterministicTracker()]``.

    Messages go to the logger ``accelerate.dash_inductor``: those about something that is not replaced or not
    deterministic as warnings, others as information, which Python shows after ``logging.basicConfig(level="INFO")``.

    Args:
        seed: as of `accelerate.utils.set_seed`.
        strict, record, guard, log_to: as of `DeterministicTraining`, which also says what is raised.
    """

    name = "dash_inductor"
    requires_logging_directory = False
    main_process_only = False

    def __init__(
        self,
        *,
        seed: int = 0,
        strict: bool = False,
        record: Folder | None = None,
        guard: Folder | None = None,
        log_to: Log | None = None,
    ) -> None:
        super().__init__()
        by = 'Accelerator(dynamo_backend="inductor")'
        self._training = DeterministicTraining(_log, by, strict=strict, record=record, guard=guard, log_to=log_to)
        set_seed(seed)
        for training in _unfinished:  # of ranks that `end_training` does not reach
            training.end()
        _unfinished[:] = [] if is_first_rank() else [self._training]
        atexit.register(self._training.end)
        self._training.begin()

    @property
    def tracker(self) -> DeterministicTraining:
        """What puts the settings in force; `tracker.end()` restores them after an exception."""
        return self._training

    def start(self) -> None:
        """Puts the settings in force again after `finish`; `Accelerator.init_trackers` calls it on the main process."""
        if not self._training.is_running:
            self._training.begin()

    def finish(self) -> None:
        """Restores the settings; `Accelerator.end_training` calls it."""
        self._training.end()
