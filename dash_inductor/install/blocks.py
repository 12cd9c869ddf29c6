"""Chooses block sizes of generated kernels by a rule, where Inductor would time several.

Where Inductor does not know which blocks suit a kernel, it offers several and times them.  In its deterministic mode it
takes one whatever the kernel does; most are for sums along rows, and a sum across rows takes up to three times as long.
The rule below reads what a kernel sums, and how large it is.  It comes from times of an H100
(``benchmarks/results/reductions*.json``, which a test compares it with), and does not depend on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..config import config
from ..upstream import seams

ACROSS = 8
"""How many times more accesses are coalesced along what a kernel keeps than along what it sums, for a sum across rows.
Inductor has the same number for the opposite."""
BUSY = 10
"""Loads and reductions from which Inductor takes smaller blocks, because registers may be few."""
ROWS = 512
"""Sums of fewer rows are left to Inductor: with blocks of few numbers of a row, few programs would run for long."""
MANY = 1 << 22
"""Elements that are many: a kernel of as many in two dimensions gets large tiles, and a smaller sum in three dimensions
is left to Inductor."""


_NAMING = "\n# in the place of @triton_heuristics.{}\n"
"""A comment in the code of a kernel, by which Inductor names it: "triton_red_..." for a reduction."""


@dataclass(frozen=True)
class Kernel:
    """A generated kernel.

    Attributes:
        kind: "pointwise", "reduction" (a loop over what is summed) or "persistent_reduction" (no loop).
        sizes: elements along "x", "y", "z", which are kept, and along "r0_", "r1_", which are summed.
        hint: along what it sums, as far as Inductor knows: "INNER", "OUTER", "OUTER_TINY" or "DEFAULT".
        scores: how many accesses are coalesced along each of `sizes`; may be empty.
        loads, stores, reductions: their numbers.
    """

    kind: str
    sizes: Mapping[str, int]
    hint: str
    scores: Mapping[str, int]
    loads: int
    stores: int
    reductions: int


def install(active: Callable[[], bool]) -> None:
    """Choose blocks of kernels whose code is generated while `active`."""
    seams.GENERATE_KERNEL.wrap(lambda plain: _choosing(plain, active))


def _choosing(generate: Callable[..., str], active: Callable[[], bool]) -> Callable[..., str]:
    """Fixes the blocks of a kernel before its code is written."""

    def generate_chosen(self: Any, *args: Any, **kwargs: Any) -> str:
        if config.rewrites_more() and config.blocks and active():
            from ..upstream import blocks

            facts = blocks.facts_of(self)
            chosen = choose(Kernel(**facts)) if facts else None
            if facts and chosen:
                blocks.fix(self, chosen)
                return generate(self, *args, **kwargs) + _NAMING.format(facts["kind"])
        return generate(self, *args, **kwargs)

    return generate_chosen


def choose(kernel: Kernel) -> dict[str, int] | None:
    """The blocks of a kernel, with its warps and stages; None where Inductor's own rule is as good."""
    sizes = kernel.sizes
    x, r = sizes["x"], sizes.get("r0_", 1)
    if kernel.kind == "pointwise":
        if {*sizes} != {"x", "y"} or kernel.loads + kernel.stores <= 2:
            return None
        large = min(x, sizes["y"]) > 32 and x * sizes["y"] >= MANY
        return _blocks(8, XBLOCK=64, YBLOCK=64) if large else None
    rows = x * sizes.get("y", 1)
    if {*sizes} == {"x", "y", "r0_"} and kernel.reductions and rows > ROWS and rows * r >= MANY:
        return _in_three_dimensions(kernel)
    if {*sizes} != {"x", "r0_"}:
        return None
    along_x, along_r = kernel.scores.get("x", 0), max(kernel.scores.get("r0_", 1), 1)
    if kernel.hint == "DEFAULT" and along_x >= ACROSS * along_r:
        return _across(kernel.kind, x, r, kernel.loads)
    if kernel.hint == "DEFAULT" and ACROSS * along_x > along_r and x > ROWS:
        return _both_ways(kernel.kind, x, r, kernel.loads)
    if kernel.hint == "INNER" and kernel.kind == "reduction" and x > ROWS:
        return _along(r, kernel.loads + kernel.reductions)
    return None


def _across(kind: str, x: int, r: int, loads: int) -> dict[str, int] | None:
    """Sums across rows of `x` numbers in all, `r` of them each."""
    if x < 2048:
        return None
    if kind == "persistent_reduction":  # 16 numbers a thread
        return _blocks(max(_up(r) // 8, 1), XBLOCK=64)
    if x <= 16384:
        return _blocks(16, XBLOCK=64, R0_BLOCK=min(_up(r), 64))
    if x >= MANY:
        return _blocks(4, XBLOCK=256, R0_BLOCK=2)
    if loads < 4 or r <= 128:
        return _blocks(4, XBLOCK=64, R0_BLOCK=8)
    return _blocks(4, XBLOCK=32, R0_BLOCK=32)


def _both_ways(kind: str, x: int, r: int, loads: int) -> dict[str, int] | None:
    """Sums of which some accesses are coalesced along what is kept, and others along what is summed."""
    if kind == "persistent_reduction":
        return _blocks(4, XBLOCK=max(2048 // _up(r), 1)) if x * r >= MANY and r <= 1024 else None
    if loads <= 4 and x <= 16384:
        return _blocks(16, XBLOCK=64, R0_BLOCK=64)
    return _blocks(8, XBLOCK=16, R0_BLOCK=64)


def _in_three_dimensions(kernel: Kernel) -> dict[str, int] | None:
    """Sums of products that are broadcast along two dimensions, as in scans by chunks: 2048 numbers of a program."""
    x, y, r = (_up(kernel.sizes[name]) for name in ("x", "y", "r0_"))
    scores = kernel.scores
    if kernel.kind == "persistent_reduction":
        rows = max(2048 // r, 1)
        wide = min(8, rows, x)
        return _blocks(4, XBLOCK=wide, YBLOCK=min(rows // wide, y)) if r <= 1024 else None
    if not scores.get("r0_", 0):  # Inductor's first choice is good where most is coalesced along x
        along_y = scores.get("y", 0) > scores.get("x", 0)
        return _blocks(8, XBLOCK=min(32, x), YBLOCK=min(32, y), R0_BLOCK=2) if along_y else None
    if ACROSS * scores["r0_"] <= max(scores.get("x", 0), scores.get("y", 0)):
        return _blocks(4, XBLOCK=min(8, x), YBLOCK=min(32, y), R0_BLOCK=8)
    return _blocks(4, XBLOCK=min(8, x), YBLOCK=min(8, y), R0_BLOCK=32)


def _along(r: int, busy: int) -> dict[str, int] | None:
    """Sums along rows of `r` numbers, of which one turn of the loop reads all up to 4096."""
    if 1024 < r <= 2048:
        return _blocks(4, XBLOCK=1, R0_BLOCK=2048)
    if 2048 < r <= 4096:
        return _blocks(8, XBLOCK=1, R0_BLOCK=4096)
    # Inductor takes half of that where registers are few, and finds by timing that it should not have.
    return _blocks(16, XBLOCK=1, R0_BLOCK=2048) if r > 4096 and busy >= BUSY else None


def _blocks(warps: int, **blocks: int) -> dict[str, int]:
    return {**blocks, "num_warps": warps, "num_stages": 1}


def _up(size: int) -> int:
    """The next power of two."""
    return int(1 << (size - 1).bit_length())
