"""Global hooks of PyTorch that a recording leaves for the life of its process, and other tests must not meet."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


def global_hooks() -> list[dict[int, object]]:
    """The dicts in which PyTorch keeps hooks of all modules and optimizers, of the kinds that recordings register."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    kinds: list[dict[int, object]] = [
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_forward_hooks_always_called,
        optimizer._global_optimizer_pre_hooks,
        optimizer._global_optimizer_post_hooks,
    ]
    return kinds


@pytest.fixture(autouse=True, scope="module")
def no_global_hooks_stay() -> Iterator[None]:
    """A graph that is compiled beside them has another compile id, so they end with the file that left them."""
    yield
    hooks = sys.modules.get("dash_inductor.observers.hooks")
    if hooks is not None:
        for kind in global_hooks():
            kind.clear()
        hooks._register.cache_clear()
