"""Runs compiled graphs without PyTorch's fill of uninitialized memory, which writes operator results twice.

Under deterministic algorithms, PyTorch fills results of ``torch.empty`` with NaN, so that reads of uninitialized memory
are reproducible.  In a compiled graph, only ATen fallbacks and custom operators allocate that way, and with few
exceptions ATen operators write their whole results.  While a graph of operators that are known to do so runs, the fill
is off.  A graph with any other operator, such as a custom one, keeps the fill.

For forward outputs without a gradient, autograd passes zeros to the backward of a graph.  These are not filled with NaN
first, either; large ones take no memory if only kernels of their own device read them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config import config
from ..upstream import seams

ALL_WRITTEN = "dash_inductor_all_written"
"""The attribute of a compiled graph that is set if all its operators are known to write their whole results."""
ONE_DEVICE = "dash_inductor_one_device"
"""The attribute of a compiled graph that is set if only kernels of the graph's own device read its tensors."""


def install(active: Callable[[], bool]) -> None:
    """Makes graphs compiled while `active()` is true run without PyTorch's fill of uninitialized memory.

    Graphs that may read memory that they have not written keep the fill.
    """
    seams.GENERATE.wrap(lambda plain: _reading(plain, active))
    seams.FINISH_GRAPH.wrap(_running)
    seams.FINISH_FUNCTION.wrap(lambda plain: _supplying(plain, active))


def _reading(generate: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Wraps code generation, to examine the graph's operators before it and set the attributes after it."""

    def generate_and_note(gm: Any, *args: Any, **kwargs: Any) -> Any:
        known: list[str] = []
        if _is_off() and active():
            from ..graph.fully_written import all_written
            from ..graph.one_device import stays_on_its_device

            known = [
                name for name, holds in ((ALL_WRITTEN, all_written), (ONE_DEVICE, stays_on_its_device)) if holds(gm)
            ]
        compiled = generate(gm, *args, **kwargs)
        for name in known:
            setattr(compiled, name, True)
        return compiled

    return generate_and_note


def _running(post_compile: Callable[..., None]) -> Callable[..., None]:
    """Wraps the last step of a graph's compile or load, so that graphs with `ALL_WRITTEN` run without the fill."""

    def finish(self: Any, *args: Any, **kwargs: Any) -> None:
        post_compile(self, *args, **kwargs)
        if getattr(self, ALL_WRITTEN, False):
            from ..upstream.fill_uninitialized_memory import without_fill

            self.current_callable = without_fill(self.current_callable)

    return finish


def _supplying(post_compile: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Wraps the last step of AOTAutograd, so that the backward makes the zeros for missing gradients without a fill."""

    def finish(self: Any, compiled: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_off() and active():
            from ..upstream.tangents import supply_zeros

            supply_zeros(compiled, _only_reads)
        return post_compile(self, compiled, *args, **kwargs)

    return finish


def _only_reads(backward: Any) -> bool:
    """Whether a compiled backward has both attributes and does not write to its inputs."""
    from ..upstream.inductor import writes_inputs

    is_known = getattr(backward, ALL_WRITTEN, False) and getattr(backward, ONE_DEVICE, False)
    return is_known and not writes_inputs(backward)


def _is_off() -> bool:
    return config.rewrites_more() and not config.fill_uninitialized_memory
