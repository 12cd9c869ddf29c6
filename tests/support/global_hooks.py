"""Global hooks of PyTorch that a test may leave, and other tests must not meet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.nn.modules import module
from torch.optim import optimizer

from dash_inductor.divergence import hooks

GLOBAL = (
    module._global_forward_hooks,
    module._global_forward_pre_hooks,
    module._global_forward_hooks_always_called,
    optimizer._global_optimizer_pre_hooks,
    optimizer._global_optimizer_post_hooks,
)


@pytest.fixture(autouse=True, scope="module")
def no_global_hooks_stay() -> Iterator[None]:
    yield
    for kind in GLOBAL:
        kind.clear()  # type: ignore[attr-defined]  # dictionaries of several types
    hooks._register.cache_clear()
