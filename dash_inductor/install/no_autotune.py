"""Switches autotuning off in graphs that are compiled under deterministic algorithms.

Even in its deterministic mode, Inductor times several block shapes of a pointwise kernel, and all configurations of the
program's own ``@triton.autotune`` kernels, and takes the fastest.  The Triton compiler contracts multiplications and
additions (FMA) differently for different block shapes, so two processes could get different bits
(docs/what-we-know.md).  Split scans, which several CTAs share, are done by one CTA, because their order of additions
depends on timing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from ..config import config
from ..upstream import compat, seams

MARK = "dash_inductor_first_that_fits"
"""The key that marks the program's own kernels in `inductor_meta` of generated code.

Because of it, their cache keys differ from those of kernels for which a timed choice is cached.
"""


def install(active: Callable[[], bool]) -> None:
    """Switches autotuning off in graphs that are compiled while `active()` is true."""
    seams.RUN_JOINT_PASSES.wrap(lambda plain: _without_autotuning(plain, active))
    seams.GENERATE.wrap(lambda plain: _without_autotuning(plain, active))
    seams.SCAN_SPLITS.wrap(lambda plain: _one_split(plain, active))
    seams.DEFINE_USER_KERNEL.wrap(lambda plain: _marking(plain, active))
    seams.KERNEL_META.wrap(_marked)
    seams.TIME_CONFIGURATIONS.wrap(_in_their_order)


def _without_autotuning(compile_graph: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Wraps a part of a compile, so that pointwise kernels get one configuration.

    The program's setting ``max_autotune_pointwise`` is respected.  Inductor pads no matmuls if the rewrite "pad_mm",
    which comes after Inductor's own passes, does it.
    """

    def compile_without_autotuning(*args: Any, **kwargs: Any) -> Any:
        if not active():
            return compile_graph(*args, **kwargs)
        with compat.without_autotuning(shape_padding="pad_mm" not in config.rewrites):
            return compile_graph(*args, **kwargs)

    return compile_without_autotuning


def _one_split(splits: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Wraps the number of splits of a scan, so that one CTA scans a whole row of floats.

    In a split scan (decoupled look-back), a CTA adds one or several sums of its predecessors, depending on what they
    have published by then.  From torch 2.14.1 on, PyTorch leaves scans with several splits to ATen under deterministic
    algorithms, so the number of splits is not changed there.
    """

    def one_split(**facts: Any) -> Any:
        hint, number = splits(**facts)
        if active() and facts["dtype"].is_floating_point and not compat.scans_stay_whole():
            number = 1
        return hint, number

    return one_split


_MARKS = ContextVar("dash_inductor_marks", default=False)
"""Whether a kernel of the program is being defined; per thread, because several may compile at the same time."""


def _marking(define: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Wraps the definition of the program's own kernels in generated code, so that they get `MARK`."""

    def define_marked(*args: Any, **kwargs: Any) -> Any:
        token = _MARKS.set(active())
        try:
            return define(*args, **kwargs)
        finally:
            _MARKS.reset(token)

    return define_marked


def _marked(meta: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Wraps the metadata of generated kernels, to add `MARK` while a kernel of the program is being defined."""
    return lambda: {**meta(), MARK: True} if _MARKS.get() else meta()


def _in_their_order(time_all: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps autotuning, so that a marked kernel gets its first configuration that fits instead of the fastest one."""

    def in_their_order(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compat.of_order(self) if self.inductor_meta.get(MARK) else time_all(self, *args, **kwargs)

    return in_their_order
