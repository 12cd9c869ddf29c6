"""Lowering of `mask_tables`: Inductor's code calls the operator's implementation."""

from __future__ import annotations

from functools import partial

from ..operators.mask_tables import mask_tables
from ..upstream.inductor import register_lowering
from .operator_call import operator_call


def register() -> None:
    register_lowering(mask_tables, type_promotion_kind=None)(partial(operator_call, mask_tables))
