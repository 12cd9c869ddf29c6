"""Suppresses PyTorch's "does not have a deterministic implementation" error for operators that run in a fixed order.

While a graph is traced, PyTorch raises this error as soon as it computes the shape of such an operator's result.
`max_unpool` decomposes into an indexed scatter, which ATen does in fixed order.  `passes.ops.sorted_values` replaces
medians and histograms; one that it does not replace raises the error when it runs.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import config
from ..upstream import seams

UNPOOLING = frozenset({"max_unpooling2d_forward_out", "max_unpooling3d_forward_out"})
SORTED = frozenset({"median CUDA with indices output", "_histc_cuda with floating point input"})
"""The names of these operators in PyTorch's errors."""
_SORTS = "sorted_values"  # the pass that replaces the operators of SORTED


def install(active: Callable[[], bool]) -> None:
    """Suppresses PyTorch's error about missing determinism for operators that run in a fixed order.

    It is suppressed in graphs that are traced while `active()` is true.
    """
    seams.ALERT.wrap(lambda plain: _passing(plain, active))


def _passing(alert: Callable[[str], None], active: Callable[[], bool]) -> Callable[[str], None]:
    """Wraps PyTorch's check so that it raises the error only for all other operators."""

    def alert_others(caller: str) -> None:
        is_traced = config.rewrites_more() if caller in UNPOOLING else caller in SORTED and _SORTS in config.rewrites
        if not is_traced or not active():
            alert(caller)

    return alert_others
