"""Sets the environment variables with which PyTorch's flight recorder records collectives; imports no torch.

They must be set before the first process group is created.
"""

from __future__ import annotations

from collections.abc import MutableMapping

VARIABLES = {"TORCH_FR_BUFFER_SIZE": "512", "TORCH_NCCL_ENABLE_TIMING": "1"}
"""The number of collectives that are kept, and the switch for their times."""


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set `VARIABLES` in an environment, except for those that the user has set."""
    for name, value in VARIABLES.items():
        environment.setdefault(name, value)
