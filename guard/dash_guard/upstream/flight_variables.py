"""Sets the variables that the first process group must find, so that collectives are recorded; imports no torch."""

from __future__ import annotations

from collections.abc import MutableMapping

VARIABLES = {"TORCH_FR_BUFFER_SIZE": "512", "TORCH_NCCL_ENABLE_TIMING": "1"}
"""The number of collectives that are kept, and the switch for their times."""


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set `VARIABLES`, except for what the user has set."""
    for name, value in VARIABLES.items():
        environment.setdefault(name, value)
