"""Products of 32 bits that become offsets of addresses, in Triton's first intermediate code (TTIR)."""

from __future__ import annotations

import re
from collections.abc import Callable

_NAME = r"%[\w.$-]+(?:#\d+)?"
_OPAQUE = ("tt.load", "tt.atomic_rmw", "tt.atomic_cas", "arith.cmpi", "arith.cmpf", "tt.dot", "tt.assert")
"""Operations whose results are no offsets, whatever they are given."""


def narrow_products(ttir: str, *, arguments: Callable[[str], bool] = bool, constant: int | None = None) -> list[str]:
    """The lines with a product of int32 that an address depends on and of which no factor is known to be small.

    Args:
        ttir: the text of a module, all of whose functions but one are inlined.
        arguments: whether an argument of this name is such a factor; so is what is computed from it.
        constant: from which size on a constant is one; None for no constant.
    """
    edges, starts, small, addresses, products = _read(_plain(ttir), arguments, constant)
    from_starts, reaching = _closure(starts, edges), _closure(addresses, _turned(edges))
    return [
        line
        for line, result, factors in products
        if result in reaching and any(each in from_starts for each in factors) and not small.intersection(factors)
    ]


_Edges = dict[str, set[str]]


def narrowed(ttir: str) -> list[str]:
    """The lines that make int32 of int64 for an address."""
    lines = [line for line in ttir.splitlines() if "arith.trunci" in line and "i64 to" in line]
    _, _, _, addresses, _ = found = _read(_plain(ttir), bool, None)
    reaching = _closure(addresses, _turned(found[0]))
    return [line for line in lines if line.strip().split(" = ")[0] in reaching]


def _plain(ttir: str) -> list[str]:
    """The lines without places in sources."""
    return [re.sub(r' loc\((?:"[^"]*"\(#\w+\)|[^()]*)\)', "", line).strip() for line in ttir.splitlines()]


def _read(
    lines: list[str], arguments: Callable[[str], bool], constant: int | None
) -> tuple[_Edges, set[str], set[str], set[str], list[tuple[str, str, list[str]]]]:
    edges: _Edges = {}
    starts: set[str] = set()
    small: set[str] = set()
    addresses: set[str] = set()
    products = []
    regions: list[list[str]] = []  # what the yields of each region that is open become

    def flows(sources: list[str], targets: list[str]) -> None:
        for source in sources:
            edges.setdefault(source, set()).update(targets)

    for line in lines:
        if line.startswith("tt.func"):
            names = re.findall(r"(%[\w.$-]+): (?!!tt\.ptr)", line)
            starts.update(name for name in names if arguments(name[1:]))
        results = re.match(rf"({_NAME})(?::(\d+))? = ", line)
        own: list[str] = []
        if results is not None:
            name, count = results[1], int(results[2] or 1)
            own = [name] if count == 1 else [f"{name}#{i}" for i in range(count)]
        body = line[results.end() :] if results is not None else line
        operands = re.findall(_NAME, body.split(" : ")[0])
        if "iter_args(" in body or body.startswith("scf.while"):
            pairs = re.findall(rf"({_NAME}) = ({_NAME})", body)
            for (inner, outer), result in zip(pairs, own, strict=False):
                flows([outer], [inner, result])
            regions.append([*own, *(inner for inner, _ in pairs)])
            continue
        if body.endswith("{") and not body.startswith("}"):
            regions.append(own)
        elif body.startswith(("scf.yield", "scf.condition")) and regions:
            inner = regions[-1]
            flows(operands, inner)  # of one region to all that it gives
        elif body == "}" and regions:
            regions.pop()
        elif body.startswith("arith.constant"):
            value = re.search(r"(?:dense<)?(-?\d+)>? : ", body)
            if value is not None:
                is_small = constant is None or abs(int(value[1])) < constant
                (small if is_small else starts).update(own)
        elif body.startswith("tt.addptr"):
            addresses.add(operands[1])
        elif not body.startswith(_OPAQUE):
            flows(operands, own)
            if body.startswith("arith.muli") and re.search(r"(: |x)i32>?$", body):
                products.append((line, own[0], operands))
    return edges, starts, small, addresses, products


def _turned(edges: _Edges) -> _Edges:
    turned: _Edges = {}
    for source, targets in edges.items():
        for target in targets:
            turned.setdefault(target, set()).add(source)
    return turned


def _closure(starts: set[str], edges: _Edges) -> set[str]:
    found, open_ = set(starts), list(starts)
    while open_:
        new = edges.get(open_.pop(), set()) - found
        found |= new
        open_.extend(new)
    return found
