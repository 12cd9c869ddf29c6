"""Groups of kernel arguments that forward and backward kernels have in common."""

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
    """Returns the argument group of a result [batch, heads, tokens, dim] that is stored token by token: pointer,
    strides, dim.

    The last dimension has unit stride.  Strides are multiples of 8 elements: TMA requires rows to begin at multiples of
    16 bytes.
    """
    strides = "batch_stride", "head_stride", "row_stride"
    types = {"ptr": f"*{dtype}"} | dict.fromkeys(strides, "i64") | {"dim": "i32"}
    return Group(types, dict.fromkeys((*strides, "dim"), 8))


def target_values(address: Address, strides: Sequence[int], dim: int) -> tuple[Any, ...]:
    """Returns the values of the argument group `target` for a result with this address, strides in elements and dim."""
    batch, head, row = strides[:3]
    return target("i8").values(ptr=address, batch_stride=batch, head_stride=head, row_stride=row, dim=dim)


def dropout(divisor: int) -> Group:
    """Returns the argument group of dropout: seed (pointer to int64 [1]), threshold and rescale, see `model.dropout`.

    Args:
        divisor: a number of bytes that is known to divide the seed's address.
    """
    return Group({"seed": "*i64", "threshold": "i32", "rescale": "fp32"}, {"seed": divisor})


def strides(multiple: int) -> Group:
    """Returns the argument group of the strides of a tensor [batch, heads, rows, ..], in elements.

    Args:
        multiple: a number that is known to divide all of them.
    """
    names = "b", "h", "row"
    return Group(dict.fromkeys(names, "i64"), dict.fromkeys(names, multiple))
