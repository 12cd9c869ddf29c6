"""Facts about a kernel that Inductor generates, its blocks fixed where they would be chosen by timing or a rule, and
barriers between its loops.

For code that runs while Inductor compiles: importing this module imports its code generation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import sympy
from torch._inductor import config
from torch._inductor.codegen.triton import FixedTritonConfig

KINDS = ("pointwise", "reduction", "persistent_reduction")


def facts_of(kernel: Any) -> dict[str, Any] | None:
    """What a rule may read of a kernel; None for a kernel of another kind, with sizes that are not known, with blocks
    of its own, and where the program asked for blocks by timing, as by ``max_autotune_pointwise``.

    Returns:
        ``kind``, one of `KINDS`; ``sizes``, the elements along "x", "y", "z" (kept) and "r0_", "r1_" (summed);
        ``hint``, along what it sums as far as Inductor knows, "INNER", "OUTER", "OUTER_TINY" or "DEFAULT"; ``scores``,
        how many of its accesses are coalesced along each of these; ``loads``, ``stores`` and ``reductions``, their
        numbers.
    """
    kind = kernel._get_heuristic()
    if config.max_autotune or config.max_autotune_pointwise or config.coordinate_descent_tuning:
        return None
    if kind not in KINDS or kernel.is_combo_kernel or getattr(kernel, "mix_order_reduction", False):
        return None
    sizes = {name: int(size) for name, size in kernel.numels.items() if isinstance(size, (int, sympy.Integer))}
    if len(sizes) < len(kernel.numels):
        return None
    scores = kernel.tiling_scores or {}
    return {
        "kind": kind,
        "sizes": {name: size for name, size in sizes.items() if kernel.inside_reduction or not name.startswith("r")},
        "hint": kernel.features.get_reduction_hint(kernel.tiling_scores).name if kernel.inside_reduction else "",
        "scores": {name: int(score) for name, score in scores.items()},
        "loads": kernel.num_load,
        "stores": kernel.num_store,
        "reductions": kernel.num_reduction,
    }


def fix(kernel: Any, blocks: Mapping[str, int]) -> None:
    """Give a kernel these blocks (``XBLOCK``, ``R0_BLOCK``, ...), ``num_warps`` and ``num_stages``."""
    kernel.fixed_config = FixedTritonConfig({**blocks})


BARRIER = "tl.debug_barrier()"
"""Lets the threads of a program wait for one another, and see what the others have written before."""


def wait_for_stores(kernel: Any, name: str) -> None:
    """Write a barrier in front of the loop that is being generated, if a kernel has stored a buffer in an earlier one.

    Nothing is written where Inductor does so itself, as torch 2.15 does.
    """
    is_read_back = name in kernel.cse.invalidated_stores
    if is_read_back and not _has_barriers(kernel.__class__) and not _ends_with_barrier(kernel.body):
        kernel.body.writeline(BARRIER)


def _ends_with_barrier(code: Any) -> bool:
    return str(code.getvalue()).rstrip().endswith(BARRIER)


@functools.cache
def _has_barriers(kind: Any) -> bool:
    """Whether Inductor writes a barrier in front of what a kernel of this class reads back."""
    plain = inspect.unwrap(kind.load)  # ours is around it
    return BARRIER in inspect.getsource(plain)
