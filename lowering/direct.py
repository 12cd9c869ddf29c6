"""Lowerings of operators that stay operators in Inductor's code, where their implementations are called."""

from __future__ import annotations

from functools import partial

from ..operators.index_sums import index_sums
from ..operators.mask_tables import mask_tables
from ..upstream.inductor import register_lowering
from .operator_call import operator_call


def register() -> None:
    for operator in (index_sums, mask_tables):
        register_lowering(operator, type_promotion_kind=None)(partial(operator_call, operator))
