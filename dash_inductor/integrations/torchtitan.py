"""Deterministic training with torchtitan: `deterministic`, for functions in a registry of configurations."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from ..errors import ArgumentError
from .training import DeterministicTraining


class DeterministicMetrics(MetricsProcessor):  # type: ignore[misc]  # mypy does not follow torchtitan
    """torchtitan's metrics processor, with deterministic settings from when it is made until it is closed."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """The fields of torchtitan's metrics, and these, which the command line sets as ``--metrics.strict``."""

        strict: bool = False
        """An attention that is not replaced, or a first step without compiled attention, is a FallbackError"""

        record: str | None = None
        """A folder for fingerprints of the training, as of dash_guard.record"""

        guard: str | None = None
        """A folder for findings about ranks, as of dash_guard.guard"""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._training = DeterministicTraining(
            logger, "--compile.enable", strict=config.strict, record=config.record, guard=config.guard
        )
        self._training.begin()

    def close(self) -> None:
        """Restores the settings, and closes torchtitan's metrics."""
        self._training.end()
        super().close()


def deterministic(config: Trainer.Config, seed: int = 0, **options: Any) -> Trainer.Config:
    """Makes the training of a configuration deterministic, and lets it say what became of its attention.

        def my_llama() -> Trainer.Config:
            return deterministic(llama3_8b())

    torchtitan itself then seeds, switches PyTorch's deterministic algorithms on and sets `CUBLAS_WORKSPACE_CONFIG` when
    its trainer is made (`debug.deterministic`, `debug.seed`).  After the first step, the trainer logs how many
    attentions were replaced and what was not; when it is closed, the flag is as before the metrics were made.

    Args:
        config: changed in place.  `compile.enable`, which compiles the model, stays as it is.
        seed: of the training; a seed that the configuration has stays.
        options: fields of `DeterministicMetrics.Config`.

    Returns:
        `config`.

    Raises:
        ArgumentError: the configuration has metrics of a class of its own.
    """
    if type(config.metrics) is not MetricsProcessor.Config:
        raise ArgumentError("config.metrics", type(config.metrics).__qualname__, "MetricsProcessor.Config")
    config.debug.deterministic = True
    if config.debug.seed is None:
        config.debug.seed = seed
    given = {field.name: getattr(config.metrics, field.name) for field in dataclasses.fields(config.metrics)}
    config.metrics = DeterministicMetrics.Config(**given, **options)
    return config
