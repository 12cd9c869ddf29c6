"""Reads and changes Triton kernels while Inductor generates them: their properties, block sizes and barriers.

For code that runs while Inductor compiles: importing this module imports Inductor's code generation.
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
    """The properties of a generated Triton kernel from which `install.blocks.choose` derives its block sizes.

    Returns:
        ``kind``, one of `KINDS`; ``sizes``, the numbers of elements along the kept dimensions "x", "y", "z" and the
        summed ones "r0_", "r1_"; ``hint``, Inductor's `ReductionHint`: "INNER", "OUTER", "OUTER_TINY" or "DEFAULT";
        ``scores``, the number of coalesced accesses by dimension; ``loads``, ``stores`` and ``reductions``, the
        numbers of these operations.  None for other kinds of kernels, symbolic sizes and kernels with fixed blocks, and
        if the program asked for autotuning, as with ``max_autotune_pointwise``.
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
    """Fixes the blocks (``XBLOCK``, ``R0_BLOCK``, ...), ``num_warps`` and ``num_stages`` of a kernel."""
    kernel.fixed_config = FixedTritonConfig({**blocks})


BARRIER = "tl.debug_barrier()"
"""Code of a barrier: the threads of a CTA wait for one another, and see each other's earlier writes."""


def wait_for_stores(kernel: Any, name: str) -> None:
    """Adds a barrier to a kernel, before the loop being generated, if an earlier loop has stored the buffer `name`.

    Nothing is added if Inductor does so itself, as in torch 2.15.
    """
    is_read_back = name in kernel.cse.invalidated_stores
    if is_read_back and not _has_barriers(kernel.__class__) and not _ends_with_barrier(kernel.body):
        kernel.body.writeline(BARRIER)


def _ends_with_barrier(code: Any) -> bool:
    return str(code.getvalue()).rstrip().endswith(BARRIER)


@functools.cache
def _has_barriers(kind: Any) -> bool:
    """Whether Inductor itself writes a barrier before a kernel of this class reads back what it has stored."""
    plain = inspect.unwrap(kind.load)  # removes our wrapper
    return BARRIER in inspect.getsource(plain)
