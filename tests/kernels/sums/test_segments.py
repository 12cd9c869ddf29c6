"""Sums of segments: in Triton's interpreter, compiled for sm_90, and how long their lists are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import triton

from dash_inductor.kernels.sums import launch
from dash_inductor.kernels.sums.device import segments
from dash_inductor.upstream.triton_compiler import ASTSource, GPUTarget

from ...support.distribution import ROOT
from ...support.processes import HANGS


def test_sums_in_the_interpreter() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.interpreted_sums", "6"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=HANGS, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "compared 6"


def test_a_program_has_as_many_elements_whatever_the_width() -> None:
    assert [launch.tiles(columns) for columns in (1, 3, 12, 64, 2048)] == [
        (1, 1024), (4, 1024), (16, 256), (64, 64), (64, 64),
    ]  # fmt: skip


def test_a_million_equal_indices_take_few_lists() -> None:
    assert launch.levels(10**6, 64) == [10**6, 31250, 978, 32]
    assert launch.levels(64, 64) == [64]
    assert launch.levels(65, 64) == [65, 4]


@pytest.mark.parametrize(
    ("value", "exact", "key", "columns", "is_first"),
    [("bf16", "fp32", "i32", 64, True), ("fp64", "fp64", "u8", 1, False)],
)
def test_kernels_compile(value: str, exact: str, key: str, columns: int, is_first: bool) -> None:
    kernel, (wide, chunk) = segments.add_segments, launch.tiles(columns)
    constants: dict[str, Any] = {
        "CHUNK": chunk, "COLUMNS": wide, "HAS_ORDER": is_first, "HAS_BASE": is_first, "IS_LAST": not is_first,
    }  # fmt: skip
    types = {"VALUES": value, "KEYS": key, "ORDER": "i64", "OUT": value, "PARTS": exact, "PART_KEYS": "i32"}
    signature = {
        name: "constexpr" if name in constants else f"*{types[name]}" if name in types else "i32"
        for name in kernel.arg_names
    }
    constexprs = {(kernel.arg_names.index(name),): constant for name, constant in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "debug": is_first})
    assert ("__assertfail" in built.asm["ptx"]) is is_first
    assert not re.search(r"\b(atom|red)\.", built.asm["ptx"])
