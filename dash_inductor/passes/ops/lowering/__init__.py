"""Inductor lowerings of the operators in `passes.ops`.  `register()` is idempotent and imports Inductor."""

from __future__ import annotations

import functools


@functools.cache
def register() -> None:
    """Make Inductor lower the operators to generated code, or to calls of their kernels."""
    from . import band_sums, distinct, index_sums, short_sums

    band_sums.register()
    distinct.register()
    index_sums.register()
    short_sums.register()
