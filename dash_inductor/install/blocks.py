"""Chooses block sizes of generated kernels by a rule instead of autotuning.

Normally, Inductor times several block sizes of a kernel.  In its deterministic mode it takes a fixed one, which suits
sums along rows (contiguous); sums across rows (strided) are then up to three times slower.  The rule below depends on
the kind of reduction and on the sizes.  It was derived from times on an H100
(``benchmarks/results/reductions*.json``, which a test compares it with), and does not depend on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..config import config
from ..upstream import seams

ACROSS = 8
"""A reduction counts as a sum across rows if at least this many times more accesses are coalesced along the kept
dimension than along the summed one.  Inductor uses the same factor for the opposite case."""
BUSY = 10
"""The number of loads and reductions from which Inductor uses smaller blocks to save registers."""
ROWS = 512
"""Sums of at most this many rows are left to Inductor: one program per row or so would occupy few SMs for long."""
MANY = 1 << 22
"""The number of elements from which a pointwise kernel in two dimensions gets large tiles; sums in three dimensions
with fewer elements are left to Inductor."""


_NAMING = "\n# in the place of @triton_heuristics.{}\n"
"""A comment added to a kernel's code, from which Inductor derives the kernel's name, such as "triton_red_..."."""


@dataclass(frozen=True)
class Kernel:
    """The properties of a generated Triton kernel on which the choice of its block sizes depends.

    Attributes:
        kind: "pointwise", "reduction" (a loop over the summed elements) or "persistent_reduction" (no loop).
        sizes: the number of elements along the kept dimensions "x", "y", "z" and the summed ones "r0_", "r1_".
        hint: Inductor's `ReductionHint`: "INNER", "OUTER", "OUTER_TINY" or "DEFAULT".
        scores: the number of coalesced accesses along each of `sizes`; may be empty.
        loads, stores, reductions: the numbers of these operations in the kernel.
    """

    kind: str
    sizes: Mapping[str, int]
    hint: str
    scores: Mapping[str, int]
    loads: int
    stores: int
    reductions: int


def install(active: Callable[[], bool]) -> None:
    """Makes Inductor use the block sizes of `choose` for kernels that are generated while `active()` is true."""
    seams.GENERATE_KERNEL.wrap(lambda plain: _choosing(plain, active))


def _choosing(generate: Callable[..., str], active: Callable[[], bool]) -> Callable[..., str]:
    """Wraps the code generation of a kernel so that its blocks are fixed before."""

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
    """Returns a kernel's block sizes, num_warps and num_stages; None if Inductor's own choice is as good."""
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
    """Blocks for sums across rows: `x` sums of `r` numbers each, with accesses coalesced along x."""
    if x < 2048:
        return None
    if kind == "persistent_reduction":  # 16 numbers per thread
        return _blocks(max(_up(r) // 8, 1), XBLOCK=64)
    if x <= 16384:
        return _blocks(16, XBLOCK=64, R0_BLOCK=min(_up(r), 64))
    if x >= MANY:
        return _blocks(4, XBLOCK=256, R0_BLOCK=2)
    if loads < 4 or r <= 128:
        return _blocks(4, XBLOCK=64, R0_BLOCK=8)
    return _blocks(4, XBLOCK=32, R0_BLOCK=32)


def _both_ways(kind: str, x: int, r: int, loads: int) -> dict[str, int] | None:
    """Blocks for sums with some accesses coalesced along the kept dimension, and others along the summed one."""
    if kind == "persistent_reduction":
        return _blocks(4, XBLOCK=max(2048 // _up(r), 1)) if x * r >= MANY and r <= 1024 else None
    if loads <= 4 and x <= 16384:
        return _blocks(16, XBLOCK=64, R0_BLOCK=64)
    return _blocks(8, XBLOCK=16, R0_BLOCK=64)


def _in_three_dimensions(kernel: Kernel) -> dict[str, int] | None:
    """Blocks for sums with two kept dimensions, such as broadcast products in chunked scans: about 2048 per program."""
    x, y, r = (_up(kernel.sizes[name]) for name in ("x", "y", "r0_"))
    scores = kernel.scores
    if kernel.kind == "persistent_reduction":
        rows = max(2048 // r, 1)
        wide = min(8, rows, x)
        return _blocks(4, XBLOCK=wide, YBLOCK=min(rows // wide, y)) if r <= 1024 else None
    if not scores.get("r0_", 0):  # Inductor's first choice is good if most accesses are coalesced along x
        along_y = scores.get("y", 0) > scores.get("x", 0)
        return _blocks(8, XBLOCK=min(32, x), YBLOCK=min(32, y), R0_BLOCK=2) if along_y else None
    if ACROSS * scores["r0_"] <= max(scores.get("x", 0), scores.get("y", 0)):
        return _blocks(4, XBLOCK=min(8, x), YBLOCK=min(32, y), R0_BLOCK=8)
    return _blocks(4, XBLOCK=min(8, x), YBLOCK=min(8, y), R0_BLOCK=32)


def _along(r: int, busy: int) -> dict[str, int] | None:
    """Blocks for sums along rows of `r` numbers; rows of at most 4096 are read in one iteration of the loop."""
    if 1024 < r <= 2048:
        return _blocks(4, XBLOCK=1, R0_BLOCK=2048)
    if 2048 < r <= 4096:
        return _blocks(8, XBLOCK=1, R0_BLOCK=4096)
    # Inductor halves this block to save registers, although the larger one is faster when both are timed.
    return _blocks(16, XBLOCK=1, R0_BLOCK=2048) if r > 4096 and busy >= BUSY else None


def _blocks(warps: int, **blocks: int) -> dict[str, int]:
    return {**blocks, "num_warps": warps, "num_stages": 1}


def _up(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return int(1 << (size - 1).bit_length())
