"""Sums of few rows by products: in Triton's interpreter, and compiled for sm_90."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dash_inductor.passes.ops.kernels.sums import one_hot_matmul as few
from dash_inductor.passes.ops.kernels.sums.device import one_hot_matmul as device

from .....support.forks import interpreted
from .code import ptx_of


def test_sums_in_the_interpreter() -> None:
    assert interpreted("one_hot_matmul", "8")[-1] == "compared 8"


ALIGNED = "values_b", "values_n", "columns"
"""Numbers that are multiples of 16, as those of contiguous values mostly are."""


@pytest.mark.parametrize(("value", "rows", "columns"), [("bf16", 128, 64), ("bf16", 32, 64), ("fp32", 16, 64)])
def test_kernel_compiles(value: str, rows: int, columns: int) -> None:
    """Nothing is added by atomics, indices are checked, 16 bits are multiplied by tensor cores, values are loaded ahead
    of products, and nothing spills.
    """
    kernel = device.sum_chunks
    constants: dict[str, Any] = {
        "ROWS": rows, "CHUNK": few.CHUNK, "STEP": few.STEP, "COLUMNS": columns, "values_c": 1,
    }  # fmt: skip
    types = {"VALUES": value, "KEYS": "u8", "PARTS": "fp32"}
    ptx = ptx_of(kernel, constants, types, (*types, *ALIGNED), num_warps=4, debug=True, sanitize_overflow=False)
    assert "__assertfail" in ptx
    assert not re.search(r"\b(atom|red)\.(?!sync)", ptx)
    assert ("mma" in ptx) is (value == "bf16")
    assert ".local" not in ptx
    assert ptx.count("cp.async.c") >= 3  # two stages ahead of the loop, and one in it


@pytest.mark.parametrize("has_base", [False, True])
def test_parts_are_added_without_atomics(has_base: bool) -> None:
    kernel = device.add_parts
    constants = {"GROUP": few.GROUP, "BLOCK": few.BLOCK, "HAS_BASE": has_base}
    ptx = ptx_of(kernel, constants, {"PARTS": "fp32", "OUT": "bf16"}, num_warps=4)
    assert not re.search(r"\b(atom|red)\.(?!sync)", ptx)
