"""Caches launch plans of attention calls by the layouts of their tensors.

Which kernels a call runs, and with which arguments, depends only on its texts and on dtypes, shapes and strides of its
tensors; between calls usually only addresses change.  So the first call with a layout makes a function that runs such
calls, and later calls look it up, which takes less host time than deriving everything again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..config import config

Results = TypeVar("Results", covariant=True)
Texts = tuple[str, str, str]
"""The call, the plan and the site's name, as the operators' text arguments."""
_KEPT = 1024
"""The maximum number of cached layouts; with dynamic sizes there may be arbitrarily many."""


class Ready(Protocol[Results]):
    """A function (tensors, extras) -> results for tensors of one layout; None if it cannot run with these addresses."""

    def __call__(self, *args: Any) -> Results | None: ...


Make = Callable[[Sequence[Tensor], Sequence[Tensor], Texts], "Ready[Results] | None"]
"""A function (tensors, extras, texts) -> `Ready` for tensors like these; None if only the implementation can run them.
"""


class Prepared:
    """An operator's implementation with cached launch plans.

    Args:
        implementation: the implementation; its arguments are the tensors, the list of extras, and the texts.
        tensors: the number of tensors before the extras.
        make: makes the functions that run calls of one layout.
    """

    def __init__(self, implementation: Callable[..., Results], tensors: int, make: Make[Results]) -> None:
        self._implementation, self._make = implementation, make
        known: dict[Any, Callable[..., Results]] = {}
        extras_place, texts_place, layouts_place = tensors, tensors + 1, tensors + 4

        def call(*args: Any) -> Results:
            """Calls the implementation; accepts one more text, the layouts of all tensors, to save computing them."""
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
        """The function (tensors, extras) -> results for tensors with these layouts, under the current settings."""
        implementation, ready = self._implementation, self._make(tensors, extras, texts)
        if ready is None:
            return lambda *args: implementation(*args, *texts)
        known = ready

        def run(*args: Any) -> Any:
            results = known(*args)
            return implementation(*args, *texts) if results is None else results

        return run
