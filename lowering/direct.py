"""Lowering of `mask_tables`, which stays an operator in Inductor's code, where its implementation is called."""

from __future__ import annotations

from functools import partial

from ..operators.mask_tables import mask_tables
from ..upstream.inductor import register_lowering
from .operator_call import operator_call


def register() -> None:
    register_lowering(mask_tables, type_promotion_kind=None)(partial(operator_call, mask_tables))
