"""How kernels for Hopper GPUs are assembled: from Triton 3.9 on as by the versions before.

Two things are new in Triton 3.9, and each costs registers, of which a kernel around matrix instructions has none to
spare:

* PTX for sm_90 is assembled by the ptxas of CUDA 13.4, which Triton has for Blackwell GPUs; earlier versions use the one
  that ``TRITON_PTXAS_PATH`` names, or the ptxas of CUDA 12.8 in their wheel.  3.9 still has that one, of CUDA 12.9.
* The descriptor of every slice of an operand of ``wgmma`` is a sum of 32 bits, which is extended to 64, and all of them
  are computed before the first matrix instruction.  Earlier versions compute the descriptor of the first slice, and add
  a constant to it in front of every other one.

Together they spill 21 to 60 instructions into a step of a backward (docs/log, "Triton 3.9 on a GPU").  `compile_hopper`
gives the older assembler PTX in which the sums are written as before.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import triton
from triton import knobs

from . import compat
from .seams import Seam

PTX_VERSION = 87
"""The version of PTX for it, which the ptxas of CUDA 12.8 and newer read."""

REVISION = "1"
"""Names in Triton's cache what becomes of PTX here: raise it with a change of `late_descriptors`."""

_HOPPER: ContextVar[bool] = ContextVar("dash_inductor_assembling", default=False)
"""Whether this thread compiles by `compile_hopper`."""

_PTXAS = Seam("triton.backends.nvidia.compiler", "get_ptxas", "the assembler of Hopper kernels")
_PTX = Seam("triton.backends.nvidia.compiler", "CUDABackend.make_ptx", "descriptors of operands in Hopper kernels")


def compile_hopper(source: Any, target: Any, options: dict[str, Any]) -> Any:
    """`triton.compile` of a kernel for a Hopper GPU."""
    if not compat.descriptors_come_early():
        return triton.compile(source, target=target, options=options)
    from triton.compiler.compiler import get_cache_invalidating_env_vars

    _install()
    variables = {**get_cache_invalidating_env_vars(), "dash_inductor_assembling": REVISION}
    token = _HOPPER.set(True)
    try:
        return triton.compile(
            source, target=target, options={"ptx_version": PTX_VERSION, **options}, _env_vars=variables
        )
    finally:
        _HOPPER.reset(token)


@functools.cache
def _install() -> None:
    _PTXAS.wrap(_with_older_ptxas)
    _PTX.wrap(_with_late_descriptors)


def _with_older_ptxas(get_ptxas: Callable[[int], Any]) -> Callable[[int], Any]:
    def get_ptxas_for(arch: int) -> Any:
        return knobs.nvidia.ptxas if _HOPPER.get() else get_ptxas(arch)

    return get_ptxas_for


def _with_late_descriptors(make_ptx: Callable[..., str]) -> Callable[..., str]:
    def make_ptx_for(*args: Any, **kwargs: Any) -> str:
        text = make_ptx(*args, **kwargs)
        return late_descriptors(text) if _HOPPER.get() else text

    return make_ptx_for


_DEFINITION = re.compile(r"\s*(or\.b64|cvt\.u64\.u32|add\.s32|bfe\.u32|and\.b32)\s+(%\w+), ([^;]*);")
_WRITTEN = re.compile(r"(?:@!?%\w+ )?[a-z][\w.:]*\s+(?:\{([^}]*)\}|(%\w+))")
_ADDRESS_BITS = 15
"""Bits of an address in shared memory as a descriptor has it, in units of 16 bytes."""


def late_descriptors(ptx: str) -> str:
    """PTX in which a descriptor is the sum of that of the first slice and a constant, in front of its use.

    A descriptor of the form ``(base + constant in 32 bits, extended) | bits`` becomes ``base, extended + (constant +
    bits)``, which is equal where the sum on the left has less than 16 bits, and ``bits`` none there.  Others stay.
    """
    lines = ptx.splitlines()
    defined = _definitions(lines)
    bases: dict[str, str] = {}
    rewritten: list[str] = []
    late = 0
    for line in lines:
        head, brace, operands = line.partition("}") if "wgmma.mma_async" in line else (line, "", "")
        for register in dict.fromkeys(re.findall(r"%rd\d+", operands)):
            found = _slice(register, defined)
            if found is None:
                continue
            base, constant = found
            extended = bases.setdefault(base, f"%rdbase{len(bases)}")
            rewritten.append(f"\tadd.s64 \t%rdlate{late}, {extended}, {constant};")
            operands = re.sub(rf"{register}\b", f"%rdlate{late}", operands)
            late += 1
        rewritten.append(head + brace + operands)
    if not late:
        return ptx
    return _declared(_extended(rewritten, bases), len(bases), late)


def _definitions(lines: list[str]) -> dict[str, tuple[str, list[str]]]:
    """(operation, operands) by register, of those that one instruction writes, without a predicate."""
    written: dict[str, int] = {}
    found: dict[str, tuple[str, list[str]]] = {}
    for line in lines:
        if some := _WRITTEN.match(line.strip()):
            for register in (some[1] or some[2]).split(","):
                written[register.strip()] = written.get(register.strip(), 0) + 1
        if one := _DEFINITION.match(line):
            found[one[2]] = one[1], [operand.strip() for operand in one[3].split(",")]
    return {register: value for register, value in found.items() if written.get(register) == 1}


def _slice(register: str, defined: dict[str, tuple[str, list[str]]]) -> tuple[str, int] | None:
    """(the address of the first slice, what is added to it) of a descriptor; None where it is of no known form."""
    operation, operands = defined.get(register, ("", []))
    if operation != "or.b64" or not operands[1].isdecimal():
        return None
    bits = int(operands[1])
    operation, operands = defined.get(operands[0], ("", []))
    if operation != "cvt.u64.u32" or bits & 0xFFFF:
        return None
    base, ahead = operands[0], 0
    operation, operands = defined.get(base, ("", []))
    if operation == "add.s32" and operands[1].isdecimal():
        base, ahead = operands[0], int(operands[1])
        operation, operands = defined.get(base, ("", []))
    cut = (operation == "bfe.u32" and int(operands[2]) <= _ADDRESS_BITS) or (
        operation == "and.b32" and operands[1].isdecimal() and int(operands[1]) < 1 << _ADDRESS_BITS
    )
    return (base, ahead + bits) if cut and ahead < 1 << _ADDRESS_BITS else None


def _extended(lines: list[str], bases: dict[str, str]) -> list[str]:
    """The lines with an instruction behind the one that writes an address, which extends it to 64 bits."""
    found = []
    for line in lines:
        found.append(line)
        one = _DEFINITION.match(line)
        if one and one[2] in bases:
            found.append(f"\tcvt.u64.u32 \t{bases[one[2]]}, {one[2]};")
    return found


def _declared(lines: list[str], bases: int, late: int) -> str:
    """The text with its new registers declared beside the others."""
    first = next(i for i, line in enumerate(lines) if line.lstrip().startswith(".reg "))
    lines[first:first] = [f"\t.reg .b64 \t%rdbase<{bases}>;", f"\t.reg .b64 \t%rdlate<{late}>;"]
    return "\n".join(lines) + "\n"
