"""Switches autotuning off in graphs that are compiled under deterministic algorithms.

Even in its deterministic mode Inductor times several block shapes of a pointwise kernel, and all configurations of a
program's own ``@triton.autotune`` kernels, and takes the fastest.  The Triton compiler contracts products and sums of
another block shape in another way, so two processes could train a model with other bits (docs/what-we-know.md).  Scans
that several CTAs share are kept in one CTA for the same reason: their order of additions depends on timing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from ..upstream import compat, seams

MARK = "dash_inductor_first_that_fits"
"""Marks the program's kernels in generated code: their keys differ from those under which timed choices are cached."""


def install(active: Callable[[], bool]) -> None:
    """Choose nothing by timing in graphs that are compiled while `active`."""
    seams.RUN_JOINT_PASSES.wrap(lambda plain: _without_autotuning(plain, active))
    seams.GENERATE.wrap(lambda plain: _without_autotuning(plain, active))
    seams.SCAN_SPLITS.wrap(lambda plain: _one_split(plain, active))
    seams.DEFINE_USER_KERNEL.wrap(lambda plain: _marking(plain, active))
    seams.KERNEL_META.wrap(_marked)
    seams.TIME_CONFIGURATIONS.wrap(_in_their_order)


def _without_autotuning(compile_graph: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Generates pointwise kernels in one configuration; the program's own ``max_autotune_pointwise`` stays."""

    def compile_without_autotuning(*args: Any, **kwargs: Any) -> Any:
        if not active():
            return compile_graph(*args, **kwargs)
        with compat.without_autotuning():
            return compile_graph(*args, **kwargs)

    return compile_without_autotuning


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
