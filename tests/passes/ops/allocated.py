"""How much memory the code of a graph holds: read from what Inductor has written."""

from __future__ import annotations

import re

_SIZE = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
_NEW = re.compile(r"(\w+) = empty_strided_cuda\(\(([^)]*)\), \(([^)]*)\), torch\.(\w+)\)")
_NAMED = re.compile(r"(\w+) = (?:reinterpret_tensor\()?(\w+)(?:, .*\))?; del (\w+)  # reuse")
_GIVEN = re.compile(r"(\w+) = rand_strided\(\(([^)]*)\), \(([^)]*)\), device='cuda:0', dtype=torch\.(\w+)\)")
_GONE = re.compile(r"(?:^|; )del (\w+)")


def peak(code: str, beside: frozenset[str] = frozenset()) -> int:
    """Bytes that a call holds at most, of what it allocates itself and of what the forward has saved.

    Sizes have to be static.  Results of operators that Inductor does not generate are not counted.

    Args:
        beside: shapes of the program's own tensors, as they are written in the code, which are there anyway.
    """
    given = _GIVEN.findall(code)
    held = {name: _bytes(shape, *others) for name, shape, *others in given if shape not in beside}
    most = sum(held.values())
    for line in code.partition("    def call(")[2].partition("runner = ")[0].splitlines():
        text = line.strip()
        if found := _NEW.match(text):
            held[found[1]] = _bytes(*found.groups()[1:])
            most = max(most, sum(held.values()))
        elif (found := _NAMED.match(text)) and found[2] == found[3]:
            held[found[1]] = held.pop(found[2])
        elif found := _GONE.search(text):
            held.pop(found[1], None)
    return most


def _bytes(shape: str, strides: str, dtype: str) -> int:
    """Bytes from the first element of a tensor to the last one."""
    sizes, steps = ([int(number) for number in each.split(",") if number.strip()] for each in (shape, strides))
    if 0 in sizes:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))) * _SIZE[dtype]
