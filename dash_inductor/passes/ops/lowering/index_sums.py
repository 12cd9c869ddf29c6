"""Lowers `index_sums`, segment sums by sorted keys, to a call of the operator's implementation."""

from __future__ import annotations

from functools import partial

from ....lowering.operator_call import operator_call
from ....upstream.inductor import register_lowering
from ..operators.index_sums import index_sums


def register() -> None:
    """Registers this module's lowering of `dash_inductor::index_sums` with Inductor."""
    register_lowering(index_sums, type_promotion_kind=None)(partial(operator_call, index_sums))
