"""Set-up of the GPU tests: what a test no longer needs of the GPU's memory, other processes can have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Blocks that PyTorch keeps go back to the GPU where they are many: several processes of tests share it."""
    yield
    import torch

    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()
