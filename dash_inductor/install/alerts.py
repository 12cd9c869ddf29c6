"""Operators that a rewrite, or PyTorch's own decomposition, makes deterministic are traced without PyTorch's error.

PyTorch raises it as soon as it is asked for the shape of a result.  Max-unpooling is a scatter by an index, which PyTorch
does in fixed order, and `passes.ops.sorted_values` has the others; one that it leaves raises where it is run.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import config
from ..upstream import seams

TRACED = frozenset({
    "max_unpooling2d_forward_out", "max_unpooling3d_forward_out", "median CUDA with indices output",
    "_histc_cuda with floating point input",
})  # fmt: skip
"""What PyTorch's errors call these operators."""


def install(active: Callable[[], bool]) -> None:
    """Trace these operators in graphs that are compiled while `active`."""
    seams.ALERT.wrap(lambda plain: _passing(plain, active))


def _passing(alert: Callable[[str], None], active: Callable[[], bool]) -> Callable[[str], None]:
    """Raises PyTorch's error for all other operators."""

    def alert_others(caller: str) -> None:
        if caller not in TRACED or config.rewrites != "all" or not active():
            alert(caller)

    return alert_others
