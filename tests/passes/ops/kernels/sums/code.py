"""The PTX of kernels of sums, compiled for sm_90 without a GPU."""

from __future__ import annotations

from typing import Any

import triton

from dash_inductor.upstream.triton_compiler import ASTSource, GPUTarget


def ptx_of(
    kernel: Any, constants: dict[str, Any], pointers: dict[str, str], divisible: tuple[str, ...] = (), **options: Any
) -> str:
    """The PTX; pointers: by argument, to what; divisible: arguments that are multiples of 16; all others are i32."""
    signature = {
        name: "constexpr" if name in constants else f"*{pointers[name]}" if name in pointers else "i32"
        for name in kernel.arg_names
    }
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    constexprs = {(kernel.arg_names.index(name),): constant for name, constant in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
