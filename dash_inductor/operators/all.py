"""All operators of the namespace `torch.ops.dash_inductor`: importing this module defines them.

`_dash_inductor_autoload` imports it when a program asks for an operator that is not defined yet, as a saved graph does
in a process that has compiled nothing.
"""

from __future__ import annotations

from ..passes.ops.operators import band_sums, distinct, few_sums, grouped_mm, index_sums, short_sums
from . import attention, mask_tables, observe

MODULES = attention, band_sums, distinct, few_sums, grouped_mm, index_sums, mask_tables, observe, short_sums
"""The modules that define operators."""
