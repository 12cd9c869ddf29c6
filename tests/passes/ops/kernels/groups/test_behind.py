"""What products of groups leave unwritten: in Triton's interpreter, and compiled for sm_90."""

from __future__ import annotations

import pytest
import triton

from dash_inductor.passes.ops.kernels.groups import launch
from dash_inductor.passes.ops.kernels.groups.device import behind
from dash_inductor.upstream.triton_compiler import ASTSource, GPUTarget

from .....support.forks import interpreted


def test_in_the_interpreter() -> None:
    assert interpreted("behind")[-1:] == ["compared"]


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
