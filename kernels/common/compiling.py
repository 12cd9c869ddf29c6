"""Compiles kernels for sm_90 without a GPU: signatures, TMA descriptor types, the schedule's generated functions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

from triton.experimental.gluon import language as gl

from ...model.mask import Band
from ...schedule import codegen
from ...upstream import toolchain
from ...upstream.assembling import compile_hopper
from ...upstream.caches import PyCodeCache
from ...upstream.triton_compiler import GPUTarget
from . import arguments
from .arguments import Groups

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {"float16": "fp16", "bfloat16": "bf16"}
"""Triton's names of torch's dtypes."""


@cache
def schedule_module(schedule: str, band: Band) -> ModuleType:
    """Generates the device functions of a schedule and band as Triton source, and loads them as a module.

    The module is a file in Inductor's cache.
    """
    text = "import triton\nimport triton.language as tl\n\n\n" + codegen.triton_source(schedule, band)
    return PyCodeCache.load(text)


def descriptor(dtype: str, block: list[int], layout: Any) -> str:
    """Returns the type of a TMA descriptor as Triton's signatures spell it.

    Args:
        dtype: Triton's name of the element type, such as "bf16".
        block: the shape of the blocks that it loads.
        layout: the layout of a block in shared memory.
    """
    return f"tensordesc<{dtype}{block},{layout!r}>"


def compile_kernel(
    function: Any,
    source: Any,
    constants: Mapping[str, Any],
    types: Mapping[str, str | Groups],
    options: dict[str, Any],
    multiples: Mapping[str, int] = {},
) -> Any:
    """Compiles a kernel for sm_90 and returns Triton's compiled kernel.

    Args:
        source: Triton's or Gluon's class of sources, which is called with function, signature, constants and
            attributes.
        constants: compile-time constants by parameter; a named tuple of them is a group.
        types: types of the parameters that are neither constants nor int32.  None is an absent group, a mapping a named
            tuple of groups.
        options: Triton's compiler options, such as the number of warps.
        multiples: known divisors of parameters that are in no group; a pointer that is not listed is a multiple of 16
            bytes.
    """
    signature: dict[str, Any] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, name in enumerate(function.arg_names):
        constant, kind = constants.get(name), types.get(name, "i32")
        if isinstance(constant, tuple):
            signature[name] = arguments.constants(constant)
            constexprs |= {(i, j): value for j, value in enumerate(constant)}
        elif name in constants:
            signature[name], constexprs[(i,)] = "constexpr", constant
        elif isinstance(kind, str):
            signature[name] = kind
            attributes |= _divisible((i,), kind, multiples.get(name))
        else:
            signature[name] = arguments.signature(kind)
            for path, group in arguments.groups((i,), kind):
                if group is None:
                    constexprs[path] = None
                    continue
                for j, (argument, type_) in enumerate(group.types.items()):
                    attributes |= _divisible((*path, j), type_, group.multiples.get(argument))
    made = source(fn=function, signature=signature, constexprs=constexprs, attrs=attributes)
    return compile_hopper(made, TARGET, {**toolchain.OPTIONS, **options})


def _divisible(path: tuple[int, ...], kind: str, multiple: int | None = None) -> dict[tuple[int, ...], list[list[Any]]]:
    """Returns Triton's divisibility attribute of the argument at this path in the signature."""
    known = (16 if kind.startswith("*") else 1) if multiple is None else multiple
    return {path: [["tt.divisibility", known]]} if known > 1 else {}


COLUMNS = 64
"""Columns of a descriptor block: the 16-bit elements in a 128-byte row of a swizzle atom."""


def columns(dtype: str, rows: int) -> str:
    """Returns the type, in Triton's signatures, of a TMA descriptor that loads blocks [1, 1, rows, COLUMNS].

    The tensor is [batch, heads, length, head dim].
    """
    block = [1, 1, rows, COLUMNS]
    element = gl.bfloat16 if dtype == "bfloat16" else gl.float16
    return descriptor(TYPES[dtype], block, gl.NVMMASharedLayout.get_default_for(block, element))
