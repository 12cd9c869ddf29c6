"""The inline assembly that compares random bits of dropout, run on numpy arrays."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

LOW = 0xFFFFFFFF


def below(bits: Any, bound: Any) -> tuple[Any, Any]:
    """Whether the lower and the upper half of `bits`, as bfloat16 numbers, are less than the halves of `bound`."""
    halves = []
    for shift in (16, 0):
        numbers = [np.asarray(x << shift & 0xFFFF0000, np.uint32).view(np.float32) for x in (bits, bound)]
        halves.append(numbers[0] < numbers[1])
    return halves[0], halves[1]


def run(assembly: str, operands: dict[str, Any]) -> dict[str, Any]:
    """Registers after the instructions of `assembly`, which is PTX in braces: integers, floats and booleans by name.

    Raises:
        ValueError: an instruction that no kernel has used so far.
    """
    values = dict(operands)

    def read(name: str) -> Any:
        return values[name] if name in values else int(name, 0)

    for line in assembly.strip().strip("{}").split(";"):
        guard, words = None, re.split(r"[ ,|]+", line.strip())
        if words[0].startswith("@"):
            guard, words = words[0][1:], words[1:]
        match words:
            case [""] | [".reg", *_]:
                pass
            case ["setp.le.s32", to, a, b]:
                values[to] = read(a) <= read(b)
            case ["setp.gt.s32", to, a, b]:
                values[to] = read(a) > read(b)
            case ["selp.b32", to, a, b, p]:
                values[to] = read(a) if read(p) else read(b)
            case ["set.lt.u32.bf16x2", to, a, b]:
                first, second = below(read(a), read(b))
                values[to] = first * 0xFFFF | second * 0xFFFF0000
            case ["setp.lt.xor.bf16x2", to, other, a, b, p]:
                values[to], values[other] = (half ^ read(p) for half in below(read(a), read(b)))
            case ["lop3.b32", to, a, b, c, "0x60"]:
                values[to] = read(a) & (read(b) ^ read(c))
            case ["mov.b32", to, a]:
                values[to] = read(a)
            case ["neg.f32", to, a] if guard is not None:
                values[to] = np.where(read(guard), -read(a), values[to])
            case _:
                raise ValueError(line)
    return values
