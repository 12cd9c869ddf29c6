"""The groups of arguments that kernels of both directions take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...common.arguments import Group
from ...common.call_launches import Address

ANY_ADDRESS = 1
"""The divisor of an address that is known where an operand may begin anywhere."""

PLACEMENT = Group({"place_ptr": "*i32", "count_ptr": "*i32"}, {"place_ptr": ANY_ADDRESS, "count_ptr": ANY_ADDRESS})
"""A mask of rows: place and count of its row blocks, see `device.placement` and `model.Placed`."""


def target(dtype: str) -> Group:
    """A tensor of results that is written to tokens, [1, heads, tokens, dim], with unit stride in the last dimension.

    TMA requires rows of results to begin at multiples of 16 bytes.
    """
    types = {"ptr": f"*{dtype}", "head_stride": "i64", "row_stride": "i64", "dim": "i32"}
    return Group(types, dict.fromkeys(("head_stride", "row_stride", "dim"), 8))


def target_values(address: Address, strides: Sequence[int], dim: int) -> tuple[Any, ...]:
    """The arguments about a `target` at this address, with these strides."""
    return target("i8").values(ptr=address, head_stride=strides[1], row_stride=strides[2], dim=dim)


def dropout(divisor: int) -> Group:
    """The seed, int64 [1] at a multiple of so many bytes, and as of `model.dropout.Dropout` threshold and rescale."""
    return Group({"seed": "*i64", "threshold": "i32", "rescale": "fp32"}, {"seed": divisor})


def strides(multiple: int) -> Group:
    """Strides of [batch, heads, rows, ..], which are multiples of a number."""
    names = "b", "h", "row"
    return Group(dict.fromkeys(names, "i64"), dict.fromkeys(names, multiple))
