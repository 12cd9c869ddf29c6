"""Inductor lowerings of the `dash` operators.  `register()` is idempotent and imports Inductor."""

from __future__ import annotations

import functools


@functools.cache
def register() -> None:
    """Make Inductor lower `dash::attention_backward` to the kernels of its plan."""
    from . import backward

    backward.register()
