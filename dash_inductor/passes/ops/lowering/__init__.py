"""Lowerings, for Inductor, of the operators that `passes.ops.operators` defines.  `register()` imports Inductor."""

from __future__ import annotations

import functools


@functools.cache
def register() -> None:
    """Registers all lowerings in this folder with Inductor, unless an earlier call did so."""
    from . import banded_matmul, distinct, index_sums, unrolled_reductions

    banded_matmul.register()
    distinct.register()
    index_sums.register()
    unrolled_reductions.register()
