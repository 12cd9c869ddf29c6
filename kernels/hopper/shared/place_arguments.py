"""The arguments of kernels whose mask is one of rows, on the side of the host; `places` has the device's side."""

from __future__ import annotations

from collections.abc import Sequence

PLACES = {"place_ptr": "*i32", "count_ptr": "*i32"}
"""The arguments of a kernel about a mask of rows, and their types; other kernels have none."""
ANY_ADDRESS = dict.fromkeys(PLACES, 1)
"""The known divisors of their addresses: operands may begin anywhere."""


def types(dtype: str, *targets: str) -> dict[str, str]:
    """The arguments of a kernel about a mask of rows and `Target`s of these names, and their types."""
    found = dict(PLACES)
    for name in targets:
        found |= {f"{name}_ptr": f"*{dtype}", f"{name}_h": "i64", f"{name}_row": "i64", f"{name}_dim": "i32"}
    return found


def multiples(*targets: str) -> dict[str, int]:
    """The known divisors of these arguments: TMA requires rows of results to begin at multiples of 16 bytes."""
    return ANY_ADDRESS | {f"{name}_{what}": 8 for name in targets for what in ("h", "row", "dim")}


def values(address: int, strides: Sequence[int], dim: int) -> tuple[int, ...]:
    """The arguments about one `Target` at this address, [1, heads, tokens, dim] with these strides."""
    return address, strides[1], strides[2], dim
