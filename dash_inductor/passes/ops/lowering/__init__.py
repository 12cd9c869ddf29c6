"""Inductor's lowerings of the operators in `passes.ops`.  `register()` is idempotent and imports Inductor."""

from __future__ import annotations

import functools


@functools.cache
def register() -> None:
    """Registers lowerings of the operators to generated code, or to calls of their kernels."""
    from . import banded_matmul, distinct, index_sums, unrolled_reductions

    banded_matmul.register()
    distinct.register()
    index_sums.register()
    unrolled_reductions.register()
