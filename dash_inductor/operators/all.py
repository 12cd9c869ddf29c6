"""Defines all operators of the namespace `torch.ops.dash_inductor` when it is imported.

`_dash_inductor_autoload` imports it when a program uses an operator that is not defined yet, for example when a saved
graph runs in a process that has compiled nothing.
"""

from __future__ import annotations

from ..passes.ops.operators import (
    banded_matmul,
    distinct,
    grouped_mm,
    index_sums,
    one_hot_matmul_sum,
    unrolled_reductions,
)
from . import attention, document_tiles, mask_tables

MODULES = (
    attention, banded_matmul, distinct, document_tiles, grouped_mm, index_sums, mask_tables, one_hot_matmul_sum,
    unrolled_reductions,
)  # fmt: skip
"""The modules that define operators."""
