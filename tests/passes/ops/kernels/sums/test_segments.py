"""Sums of segments: in Triton's interpreter, compiled for sm_90, and how long their lists are."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dash_inductor.passes.ops.kernels.sums import launch
from dash_inductor.passes.ops.kernels.sums.device import segments

from .....support.forks import interpreted
from .code import ptx_of


def test_sums_in_the_interpreter() -> None:
    assert interpreted("sums", "6")[-1] == "compared 6"


def test_a_program_has_as_many_elements_whatever_the_width() -> None:
    """Of narrow rows; wide ones have one length of a walk, which bits depend on."""
    assert [(launch.tile_of(columns), launch.chunk_of(columns)) for columns in (1, 3, 12, 17, 64, 2048)] == [
        (1, 1024), (4, 1024), (16, 256), (32, 64), (64, 64), (128, 64),
    ]  # fmt: skip


def test_a_million_equal_indices_take_few_lists() -> None:
    assert launch.levels(10**6, 64) == [10**6, 31250, 978, 32]
    assert launch.levels(64, 64) == [64]
    assert launch.levels(65, 64) == [65, 4]


@pytest.mark.parametrize(
    ("value", "exact", "key", "columns", "is_first"),
    [("bf16", "fp32", "i32", 128, True), ("fp32", "fp32", "i32", 64, False), ("fp64", "fp64", "u8", 1, False)],
)
def test_kernels_compile(value: str, exact: str, key: str, columns: int, is_first: bool) -> None:
    """Nothing is added by atomics, indices are checked at first, and a walk reads eight rows before it adds."""
    is_walked = launch.is_walked(columns)
    kernel = segments.walk_segments if is_walked else segments.scan_segments
    constants: dict[str, Any] = {
        "CHUNK": launch.chunk_of(columns), "COLUMNS": launch.tile_of(columns), "HAS_ORDER": is_first,
        "HAS_BASE": is_first, "IS_LAST": not is_first, "values_c": 1,
    }  # fmt: skip
    types = {"VALUES": value, "KEYS": key, "ORDER": "i64", "OUT": value, "PARTS": exact, "PART_KEYS": "i32"}
    divisible = (*types, "values_n", "columns")
    warps = 1 if is_walked else 4
    ptx = ptx_of(kernel, constants, types, divisible, num_warps=warps, debug=is_first, sanitize_overflow=False)
    assert ("__assertfail" in ptx) is is_first
    assert not re.search(r"\b(atom|red)\.", ptx)
    if is_walked and value == "bf16":
        assert len(re.findall(r"ld\.global\.v2\.b32", ptx)) >= 8
        assert "shfl" not in ptx
