"""Argument groups that both forward and backward kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...common.arguments import Group
from ...common.call_launches import Address

ANY_ADDRESS = 1
"""The known divisor of an address that has no alignment."""

VARLEN_LAYOUT = Group(
    {"token_offset_ptr": "*i32", "token_count_ptr": "*i32"},
    {"token_offset_ptr": ANY_ADDRESS, "token_count_ptr": ANY_ADDRESS},
)
"""A varlen layout: token offset and token count of its row blocks, see `device.varlen_layout` and `model.VarlenLayout`.
"""


def target(dtype: str) -> Group:
    """Returns the group of a result that is stored to tokens, [1, heads, tokens, dim], unit stride in the last
    dimension.

    TMA requires rows of results to begin at multiples of 16 bytes.
    """
    types = {"ptr": f"*{dtype}", "head_stride": "i64", "row_stride": "i64", "dim": "i32"}
    return Group(types, dict.fromkeys(("head_stride", "row_stride", "dim"), 8))


def target_values(address: Address, strides: Sequence[int], dim: int) -> tuple[Any, ...]:
    """Returns the values of a `target` at this address, with these strides."""
    return target("i8").values(ptr=address, head_stride=strides[1], row_stride=strides[2], dim=dim)


def dropout(divisor: int) -> Group:
    """Returns the group of seed (int64 [1], a multiple of `divisor` bytes), threshold and rescale, see
    `model.dropout`.
    """
    return Group({"seed": "*i64", "threshold": "i32", "rescale": "fp32"}, {"seed": divisor})


def strides(multiple: int) -> Group:
    """Returns the group of the strides of [batch, heads, rows, ..], all divisible by `multiple`."""
    names = "b", "h", "row"
    return Group(dict.fromkeys(names, "i64"), dict.fromkeys(names, multiple))
