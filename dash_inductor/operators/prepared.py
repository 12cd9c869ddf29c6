"""Calls of attention that are prepared once for all tensors of the same layouts.

Which kernels a call runs, and with which numbers, follows from its texts, and from dtypes, shapes and strides of its
tensors.  Programs repeat these, and what changes from call to call is addresses.  So a function is made for a layout in
its first call, and later calls find it, which takes less time of the host than to work all of it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..config import config

Results = TypeVar("Results", covariant=True)
Texts = tuple[str, str, str]
"""The call, the plan and the site's name, as the operators take them."""
_KEPT = 1024
"""So many layouts are kept; with dynamic sizes there is no end of them."""


class Ready(Protocol[Results]):
    """(tensors, extras) -> results, of tensors of one layout; None where it cannot run a call with these addresses."""

    def __call__(self, *args: Any) -> Results | None: ...


Make = Callable[[Sequence[Tensor], Sequence[Tensor], Texts], "Ready[Results] | None"]
"""(tensors, extras, texts) -> the function for tensors like these; None where only the implementation can run them."""


class Prepared:
    """An operator's implementation, whose calls are prepared.

    Args:
        implementation: takes tensors, the list of extras, and the texts.
        tensors: how many there are before the extras.
        make: makes the functions.
    """

    def __init__(self, implementation: Callable[..., Results], tensors: int, make: Make[Results]) -> None:
        self._implementation, self._make = implementation, make
        known: dict[Any, Callable[..., Results]] = {}
        extras_place, texts_place, layouts_place = tensors, tensors + 1, tensors + 4

        def call(*args: Any) -> Results:
            """As the implementation, which may be given one text more: the layouts of all tensors, if that is known."""
            of_call, extras = args[:extras_place], args[extras_place]
            key: tuple[Any, ...] = args[texts_place:], config.profile
            if len(args) == layouts_place:
                key = *key, of_call[0].device, *[(t.dtype, t.shape, t.stride()) for t in (*of_call, *extras)]
            run = known.get(key)
            if run is None:
                if len(known) >= _KEPT:
                    known.clear()
                run = known[key] = self.of(of_call, extras, args[texts_place:layouts_place])
            return run(*of_call, extras)

        self.call = call

    def of(self, tensors: Sequence[Tensor], extras: Sequence[Tensor], texts: Texts) -> Callable[..., Any]:
        """The function (tensors, extras) -> results for tensors with these layouts, under the present settings."""
        implementation, ready = self._implementation, self._make(tensors, extras, texts)
        if ready is None:
            return lambda *args: implementation(*args, *texts)
        known = ready

        def run(*args: Any) -> Any:
            results = known(*args)
            return implementation(*args, *texts) if results is None else results

        return run
