"""Compiling a kernel for sm_90 without a GPU: signatures, descriptors, and the schedule's generated functions."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import triton
from triton.experimental.gluon import language as gl

from ...model.mask import Band
from ...schedule import codegen
from ...upstream import toolchain
from ...upstream.caches import PyCodeCache
from ...upstream.triton_compiler import GPUTarget

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {"float16": "fp16", "bfloat16": "bf16"}
"""Triton's names of the dtypes."""


@cache
def schedule_module(schedule: str, band: Band) -> ModuleType:
    """The schedule's generated functions as a module, kept as a file in Inductor's cache."""
    text = "import triton\nimport triton.language as tl\n\n\n" + codegen.triton_source(schedule, band)
    return PyCodeCache.load(text)


def descriptor(dtype: str, block: list[int], layout: Any) -> str:
    """The type of a TMA descriptor, as Triton's signatures spell it."""
    return f"tensordesc<{dtype}{block},{layout!r}>"


def compile_kernel(
    function: Any,
    source: Any,
    constants: dict[str, Any],
    types: dict[str, str],
    multiples: dict[str, int],
    options: dict[str, Any],
) -> Any:
    """Triton's compiled kernel.

    Args:
        types: of the arguments that are neither constants nor int32.
        multiples: what is known to divide an argument; 16 bytes for a pointer that is not in it.
    """
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], constexprs[(i,)] = "constexpr", constants[name]
            continue
        signature[name] = types.get(name, "i32")
        multiple = multiples.get(name, 16 if signature[name].startswith("*") else 1)
        if multiple > 1:
            attributes[(i,)] = [["tt.divisibility", multiple]]
    return triton.compile(
        source(fn=function, signature=signature, constexprs=constexprs, attrs=attributes),
        target=TARGET,
        options={**toolchain.OPTIONS, **options},
    )


COLUMNS = 64
"""Columns of a block of a descriptor: as many numbers of 16 bits as a row of a swizzle atom has."""


def columns(dtype: str, rows: int) -> str:
    """The type of a descriptor of [batch, heads, rows, columns]; its blocks are COLUMNS columns of so many rows."""
    block = [1, 1, rows, COLUMNS]
    element = gl.bfloat16 if dtype == "bfloat16" else gl.float16
    return descriptor(TYPES[dtype], block, gl.NVMMASharedLayout.get_default_for(block, element))
