"""Runs compiled graphs without PyTorch's fill of uninitialized memory, which writes results of operators twice.

Under deterministic algorithms PyTorch fills the result of ``torch.empty`` with NaN, so that a program that reads memory
which nothing has written reads the same everywhere.  In a compiled graph only operators that Inductor does not generate
allocate in that way, and PyTorch's operators write their whole results, with few exceptions.  While a graph of such
operators runs, the fill is off.  A graph with any other operator, such as one of the program's own, keeps the fill.

Autograd hands zeros to the backward of a graph for results without a gradient.  They are not filled first, either, and
where only kernels of their own device read them, large zeros take no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config import config
from ..upstream import seams

ALL_WRITTEN = "dash_inductor_all_written"
"""An attribute of a compiled graph: all operators in it are known to write all of their results."""
ONE_DEVICE = "dash_inductor_one_device"
"""An attribute of a compiled graph: only kernels of its own device are known to read a tensor."""


def install(active: Callable[[], bool]) -> None:
    """Run graphs that are compiled while `active` without fill, where nobody can miss it."""
    seams.GENERATE.wrap(lambda plain: _reading(plain, active))
    seams.FINISH_GRAPH.wrap(_running)
    seams.FINISH_FUNCTION.wrap(lambda plain: _supplying(plain, active))


def _reading(generate: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Reads the operators of a graph before its code is generated, and notes the answers in the compiled graph."""

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
    """Puts the call of a graph, compiled here or taken from a cache, into a block without fill."""

    def finish(self: Any, *args: Any, **kwargs: Any) -> None:
        post_compile(self, *args, **kwargs)
        if getattr(self, ALL_WRITTEN, False):
            from ..upstream.fill_uninitialized_memory import without_fill

            self.current_callable = without_fill(self.current_callable)

    return finish


def _supplying(post_compile: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Lets backwards make the zeros that autograd would fill first."""

    def finish(self: Any, compiled: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_off() and active():
            from ..upstream.tangents import supply_zeros

            supply_zeros(compiled, _only_reads)
        return post_compile(self, compiled, *args, **kwargs)

    return finish


def _only_reads(backward: Any) -> bool:
    """Whether a graph has only operators of which it is known what they write, and that read on one device, and none
    of them writes to an input.
    """
    from ..upstream.inductor import writes_inputs

    is_known = getattr(backward, ALL_WRITTEN, False) and getattr(backward, ONE_DEVICE, False)
    return is_known and not writes_inputs(backward)


def _is_off() -> bool:
    return config.rewrites_more() and not config.fill_uninitialized_memory
