"""Nothing in a compiled graph is chosen by timing, and nothing adds in an order that depends on it.

Even in its deterministic mode Inductor times several block shapes of a pointwise kernel, and all configurations of a
program's own ``@triton.autotune`` kernels, and takes the fastest.  The compiler contracts products and sums of another
block shape in another way, so two processes could train a model with other bits (docs/what-we-know.md).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from ..upstream import compat, seams

MARK = "dash_inductor_first_that_fits"
"""Written into the generated code of the program's kernels, so that no cache has a choice by timing for them."""


def install(active: Callable[[], bool]) -> None:
    """Keep clocks out of graphs that are compiled while `active`."""
    seams.RUN_JOINT_PASSES.wrap(lambda plain: _without_clock(plain, active))
    seams.GENERATE.wrap(lambda plain: _without_clock(plain, active))
    seams.SCAN_SPLITS.wrap(lambda plain: _one_split(plain, active))
    seams.DEFINE_USER_KERNEL.wrap(lambda plain: _marking(plain, active))
    seams.KERNEL_META.wrap(_marked)
    seams.TIME_CONFIGURATIONS.wrap(_in_their_order)


def _without_clock(compile_graph: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Generates pointwise kernels in one configuration; the program's own ``max_autotune_pointwise`` stays."""

    def compile_without_clock(*args: Any, **kwargs: Any) -> Any:
        if not active():
            return compile_graph(*args, **kwargs)
        with compat.without_clock():
            return compile_graph(*args, **kwargs)

    return compile_without_clock


def _one_split(splits: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Lets one CTA scan a whole row of floats.

    CTAs that share a row add what their predecessors have published by then, one sum or several.  From 2.14.1 on,
    PyTorch leaves such scans to ATen under deterministic algorithms, by the number of splits, which therefore stays.
    """

    def one_split(**facts: Any) -> Any:
        hint, number = splits(**facts)
        if active() and facts["dtype"].is_floating_point and not compat.scans_stay_whole():
            number = 1
        return hint, number

    return one_split


_MARKS = ContextVar("dash_inductor_marks", default=False)
"""Whether a kernel of the program is being defined, on this thread: others may compile at the same time."""


def _marking(define: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Marks kernels of the program in the generated code."""

    def define_marked(*args: Any, **kwargs: Any) -> Any:
        token = _MARKS.set(active())
        try:
            return define(*args, **kwargs)
        finally:
            _MARKS.reset(token)

    return define_marked


def _marked(meta: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Adds the mark to the facts about a kernel of the program."""
    return lambda: {**meta(), MARK: True} if _MARKS.get() else meta()


def _in_their_order(time_all: Callable[..., Any]) -> Callable[..., Any]:
    """Takes the first configuration that fits in a marked kernel, where PyTorch would take the fastest."""

    def in_their_order(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compat.of_order(self) if self.inductor_meta.get(MARK) else time_all(self, *args, **kwargs)

    return in_their_order
