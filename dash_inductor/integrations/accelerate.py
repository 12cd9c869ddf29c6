"""Deterministic training with Accelerate: `DeterministicTracker`."""

from __future__ import annotations

from accelerate.logging import get_logger
from accelerate.tracking import GeneralTracker
from accelerate.utils import set_seed

from ..observers.log import Log
from ._training import DeterministicTraining, Folder

_log = get_logger("accelerate.dash_inductor")


class DeterministicTracker(GeneralTracker):  # type: ignore[misc]  # mypy does not follow accelerate
    """Makes the training between `init_trackers` and `end_training` deterministic, and says what became of attention.

        accelerator = Accelerator(dynamo_backend="inductor", log_with=DeterministicTracker(seed=0))
        accelerator.init_trackers("run")

    When it is made, it seeds all generators, alike on all ranks, and sets `CUBLAS_WORKSPACE_CONFIG` if the environment
    does not.  `init_trackers` switches PyTorch's deterministic algorithms on, and says if the variable was set too
    late; call it before the first forward.  After the first step of an optimizer, it logs how many attentions were
    replaced and what was kept.  `end_training` restores the flag.  It tracks no values, and stands beside other
    trackers: ``log_with=["tensorboard", DeterministicTracker()]``.

    Messages go to the logger ``accelerate.dash_inductor``: those about something that is kept or not deterministic as
    warnings, others as information, which Python shows after ``logging.basicConfig(level="INFO")``.

    Args:
        seed: as of `accelerate.utils.set_seed`.
        strict: an attention that is not replaced, or a first step without compiled attention, is a `FallbackError`.
        record: a folder for fingerprints of the training, as of `dash_guard.record`.
        guard: a folder for findings about its ranks, as of `dash_guard.guard`.
        log_to: a logger of `dash_inductor.integrations` for W&B, TensorBoard or MLflow, which gets the records as a
            table, with `record` digests of each step, and with `guard` findings as alerts.

    Raises:
        MissingPackageError: `record` or `guard` is given, and dash_guard is not installed.
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

    @property
    def tracker(self) -> DeterministicTraining:
        """What puts the settings in force; `tracker.end()` restores them after an exception."""
        return self._training

    def start(self) -> None:
        """Puts the settings in force; `Accelerator.init_trackers` calls it."""
        self._training.begin()

    def finish(self) -> None:
        """Restores the settings; `Accelerator.end_training` calls it."""
        self._training.end()
