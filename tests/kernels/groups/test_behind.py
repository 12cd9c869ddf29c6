"""What products of groups leave unwritten: in Triton's interpreter, and compiled for sm_90."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import triton

from dash_inductor.kernels.groups import launch
from dash_inductor.kernels.groups.device import behind
from dash_inductor.upstream.triton_compiler import ASTSource, GPUTarget

from ...support.distribution import ROOT
from ...support.processes import HANGS


def test_in_the_interpreter() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.interpreted_behind"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=HANGS, check=False,
    )  # fmt: skip
    assert result.stdout.splitlines()[-1:] == ["compared"], result.stdout + result.stderr


@pytest.mark.parametrize("dim", [0, 1])
def test_the_kernel_compiles(dim: int) -> None:
    kernel = behind.fill_behind
    constants = {"DIM": dim, "PROGRAMS": launch.PROGRAMS, "BLOCK": launch.BLOCK}
    types = {"OUT": "*bf16", "OFFSETS": "*i32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): constant for name, constant in constants.items()},
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert "st.global" in built.asm["ptx"]
