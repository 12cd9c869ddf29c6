"""All operators of the namespace `torch.ops.dash_inductor`: importing this module defines them.

`_dash_inductor_autoload` imports it when a program asks for an operator that is not defined yet, as a saved graph does
in a process that has compiled nothing.
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
from . import attention, mask_tables

MODULES = (
    attention, banded_matmul, distinct, grouped_mm, index_sums, mask_tables, one_hot_matmul_sum, unrolled_reductions,
)  # fmt: skip
"""The modules that define operators."""
