"""Traces operators that PyTorch refuses under deterministic algorithms, although they are computed in a fixed order.

PyTorch raises its error as soon as the shape of a result is asked for.  `max_unpool` decomposes into a scatter by an
index, which ATen does in fixed order.  `passes.ops.sorted_values` replaces medians and histograms; one that it leaves
raises the error where it runs.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import config
from ..upstream import seams

UNPOOLING = frozenset({"max_unpooling2d_forward_out", "max_unpooling3d_forward_out"})
SORTED = frozenset({"median CUDA with indices output", "_histc_cuda with floating point input"})
"""What PyTorch's errors call these operators."""
_SORTS = "sorted_values"  # the pass that replaces the latter


def install(active: Callable[[], bool]) -> None:
    """Trace these operators in graphs that are compiled while `active`."""
    seams.ALERT.wrap(lambda plain: _passing(plain, active))


def _passing(alert: Callable[[str], None], active: Callable[[], bool]) -> Callable[[str], None]:
    """Raises PyTorch's error for all other operators."""

    def alert_others(caller: str) -> None:
        is_traced = config.rewrites_more() if caller in UNPOOLING else caller in SORTED and _SORTS in config.rewrites
        if not is_traced or not active():
            alert(caller)

    return alert_others
