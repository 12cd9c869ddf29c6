"""Inductor lowerings of the operators of attention.  `register()` is idempotent and imports Inductor."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..model.plan import Plan
    from ..model.site import Site


@functools.cache
def register() -> None:
    """Make Inductor lower the operators to the kernels of their plans."""
    from . import backward, direct, forward, seed

    backward.register()
    direct.register()
    forward.register()
    seed.register()


def compile_kernels(site: Site, plan: Plan, device: torch.device, has_backward: bool = True) -> None:
    """Compile what will run at a site, with a backward or without one, before its graph is rewritten.

    Raises whatever keeps a kernel from it.
    """
    from . import ahead

    ahead.compile_kernels(site, plan, device, has_backward)
