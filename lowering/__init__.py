"""Inductor lowerings of the attention operators.  `register()` is idempotent and imports Inductor."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..model.plan import Plan
    from ..model.site import Site


@functools.cache
def register() -> None:
    """Registers the lowerings of all operators with Inductor, once."""
    from . import backward, forward, operator_call, seed

    backward.register()
    forward.register()
    operator_call.register()
    seed.register()


def compile_kernels(site: Site, plan: Plan, device: torch.device, has_backward: bool = True) -> None:
    """Compiles the kernels of a site, before its graph is rewritten; arguments as for `ahead.compile_kernels`.

    An error of the compiler is raised here, so that the site can be left unchanged.
    """
    from . import ahead

    ahead.compile_kernels(site, plan, device, has_backward)
