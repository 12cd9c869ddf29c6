"""Compiles Hopper kernels with Triton >= 3.9 so that they need no more registers than with earlier versions.

Triton 3.9 has two changes that cost registers, of which kernels with matrix instructions have none to spare:
* PTX for sm_90 is assembled by the ptxas of CUDA 13.4, which Triton ships for Blackwell GPUs.  Earlier versions use the
  one named by ``TRITON_PTXAS_PATH``, or the ptxas of CUDA 12.8 in their wheel; 3.9 still contains one of CUDA 12.9.
* The matrix descriptor of every slice of a ``wgmma`` operand is a 32-bit sum that is extended to 64 bits, and all are
  computed before the first matrix instruction.  Earlier versions compute the descriptor of the first slice, and add a
  constant to it before each of the others.

Together they add 16 to 50 spill instructions to each step of a backward, which then runs at 0.87x its speed at D=64.
`compile_hopper` uses the older assembler, with PTX in which the sums are written as before (`plain_descriptors`).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import triton
from triton import knobs

from . import compat
from .seams import Seam

PTX_VERSION = 87
"""The PTX version for the older assembler: the one that Triton 3.6 writes."""

REVISION = "3"
"""The version of `plain_descriptors` in Triton's cache keys: increase it with every change of that function."""

_HOPPER: ContextVar[bool] = ContextVar("dash_inductor_assembling", default=False)
"""Whether this thread is inside `compile_hopper`."""

_PTXAS = Seam("triton.backends.nvidia.compiler", "get_ptxas", "the assembler of Hopper kernels")
_PTX = Seam("triton.backends.nvidia.compiler", "CUDABackend.make_ptx", "descriptors of operands in Hopper kernels")


def compile_hopper(source: Any, target: Any, options: dict[str, Any]) -> Any:
    """Compiles a kernel for a Hopper GPU, as `triton.compile` does; see the module's docstring for Triton >= 3.9."""
    if not compat.computes_early():
        return triton.compile(source, target=target, options=options)
    from triton.compiler.compiler import get_cache_invalidating_env_vars

    _install()
    variables = {**get_cache_invalidating_env_vars(), "dash_inductor_assembling": REVISION}
    options = {"ptx_version": PTX_VERSION, **options}
    token = _HOPPER.set(True)
    try:
        return triton.compile(source, target=target, options=options, _env_vars=variables)
    finally:
        _HOPPER.reset(token)


@functools.cache
def _install() -> None:
    _PTXAS.wrap(_with_older_ptxas)
    _PTX.wrap(_with_plain_descriptors)


def _with_older_ptxas(get_ptxas: Callable[[int], Any]) -> Callable[[int], Any]:
    def get_ptxas_for(arch: int) -> Any:
        return knobs.nvidia.ptxas if _HOPPER.get() else get_ptxas(arch)

    return get_ptxas_for


def _with_plain_descriptors(make_ptx: Callable[..., str]) -> Callable[..., str]:
    def make_ptx_for(*args: Any, **kwargs: Any) -> str:
        text = make_ptx(*args, **kwargs)
        return plain_descriptors(text) if _HOPPER.get() else text

    return make_ptx_for


class _Written(NamedTuple):
    """The only instruction that writes a register: its line number, operation and operands."""

    line: int
    operation: str
    operands: list[str]


_DEFINITION = re.compile(r"\s*(or\.b64|cvt\.u64\.u32|add\.s32|or\.b32|bfe\.u32|and\.b32)\s+(%\w+), ([^;]*);")
_ANY_DEFINITION = re.compile(r"\s*(?:@!?%\w+ )?[a-z][\w.:]*\s+(?:\{([^}]*)\}|(%\w+))")
_FENCE = "wgmma.fence"
"""The instruction before the first matrix instruction of a group."""
_BRANCH = re.compile(r"\s*(?:@!?%\w+ )?bra[.\w]*\s+(\$L__BB\w+)")
_LOW = 0xFFFF
"""The bits of a descriptor that hold the address."""
_ADDRESS_BITS = 15
"""The number of bits of an address in shared memory, in units of 16 bytes."""


def plain_descriptors(ptx: str) -> str:
    """Rewrites PTX so that descriptors are 64-bit sums, each computed just before its use.

    ``(base + constant, in 32 bits, extended to 64) | bits`` becomes ``(base, extended) + constant``.  Instructions that
    are not proved to have this form and an equal result are not changed.  A descriptor that is constant in the loop of
    its use stays outside of the loop.

    The base is computed again for each group of matrix instructions, after the fence before them: the assembler moves
    sums of a base that is known early to before the barriers that the group waits for, where warps wait for each other.
    """
    lines = ptx.splitlines()
    times = _writes(lines)
    written, loops = _written(lines, times), _loops(lines)
    early: dict[str, str] = {}
    late: dict[str, str] = {}
    before: dict[int, list[str]] = {}
    after: dict[int, list[str]] = {}
    count = sums = 0
    for use, line in enumerate(lines):
        if _FENCE in line or line.startswith("$L__BB"):
            late = {}
        if "wgmma.mma_async" not in line:
            continue
        matrix, brace, operands = line.partition("}")
        for register in dict.fromkeys(re.findall(r"%rd\d+", operands)):
            found = _sum(register, written)
            if found is None:
                continue
            base, constant = found
            place, address = written[register].line, written[base]
            leaves = loops[place] != loops[use]
            again = not leaves and all(times.get(operand, 1) == 1 for operand in address.operands)
            extended = late if again else early
            if base not in extended:
                low, extended[base] = base, f"%dash_base{count}"
                if again:
                    low = f"%dash_low{count}"
                    copy = f"\t{address.operation} \t{low}, {', '.join(address.operands)};"
                    before.setdefault(use, []).append(copy)
                extension = f"\tcvt.u64.u32 \t{extended[base]}, {low};"
                (before.setdefault(use, []) if again else after.setdefault(address.line, [])).append(extension)
                count += 1
            if leaves:
                lines[place] = f"\tadd.s64 \t{register}, {extended[base]}, {constant};"
                continue
            before.setdefault(use, []).append(f"\tadd.s64 \t%dash_late{sums}, {extended[base]}, {constant};")
            operands = re.sub(rf"{register}\b", f"%dash_late{sums}", operands)
            sums += 1
        lines[use] = matrix + brace + operands
    if not count:
        return ptx
    registers = (
        f"\t.reg .b32 \t%dash_low<{count}>;", f"\t.reg .b64 \t%dash_base<{count}>;",
        f"\t.reg .b64 \t%dash_late<{sums + 1}>;",
    )  # fmt: skip
    first = next(i for i, line in enumerate(lines) if line.lstrip().startswith(".reg "))
    made: list[str] = []
    for i, line in enumerate(lines):
        made += registers if i == first else ()
        made += (*before.get(i, ()), line, *after.get(i, ()))
    return "\n".join(made) + "\n"


def _sum(register: str, written: dict[str, _Written]) -> tuple[str, int] | None:
    """Splits a descriptor into (base, constant) whose sum it is, with the base extended to 64 bits; None if unknown.

    The base is an address of less than 16 bits, and the low bits of the constant leave room for it.  So the addition
    does not carry, and an ``or`` with higher bits is an addition.
    """
    last = written.get(register)
    if last is None or last.operation != "or.b64" or not last.operands[1].isdecimal():
        return None
    bits, extension = int(last.operands[1]), written.get(last.operands[0])
    if extension is None or extension.operation != "cvt.u64.u32" or bits & _LOW:
        return None
    base, constant = extension.operands[0], 0
    address = written.get(base)
    if address is not None and address.operation in ("add.s32", "or.b32") and address.operands[1].isdecimal():
        constant = int(address.operands[1])
        if address.operation == "or.b32" and constant & _LOW:
            return None
        base = address.operands[0]
        address = written.get(base)
    if address is None or not _is_address(address) or constant & _LOW >= 1 << _ADDRESS_BITS:
        return None
    return base, (bits | constant & ~_LOW) + (constant & _LOW)


def _is_address(value: _Written) -> bool:
    """Whether a value has at most `_ADDRESS_BITS` bits, according to the instruction that writes it."""
    if value.operation == "bfe.u32":
        return value.operands[2].isdecimal() and int(value.operands[2]) <= _ADDRESS_BITS
    bits = value.operands[1]
    return value.operation == "and.b32" and bits.isdecimal() and int(bits) < 1 << _ADDRESS_BITS


def _writes(lines: Sequence[str]) -> dict[str, int]:
    """The number of instructions that write each register; a line of inline assembly may have several."""
    times: dict[str, int] = {}
    for instruction in itertools.chain.from_iterable(line.split(";") for line in lines):
        if some := _ANY_DEFINITION.match(instruction):
            for register in (some[1] or some[2]).split(","):
                times[register.strip()] = times.get(register.strip(), 0) + 1
    return times


def _written(lines: Sequence[str], times: dict[str, int]) -> dict[str, _Written]:
    """The instruction that writes a register, for registers written once by an operation that occurs in descriptors."""
    found: dict[str, _Written] = {}
    for i, line in enumerate(lines):
        if one := _DEFINITION.match(line):
            found[one[2]] = _Written(i, one[1], [operand.strip() for operand in one[3].split(",")])
    return {register: value for register, value in found.items() if times[register] == 1}


def _loops(lines: Sequence[str]) -> list[frozenset[int]]:
    """The loops that contain each line, given by their first lines; a loop is a label up to the last branch
    back to it.
    """
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith("$L__BB")}
    ends: dict[int, int] = {}
    for i, line in enumerate(lines):
        branch = _BRANCH.match(line)
        if branch and labels[branch[1]] <= i:
            ends[labels[branch[1]]] = i
    return [frozenset(start for start, end in ends.items() if start <= i <= end) for i in range(len(lines))]
