"""A module hook that does nothing in copies of the module."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch


class Hook:
    """A module hook that calls a method in eager code.

    A copy of the hook, in a copy of the module or a saved file, does nothing and does not need this package.

    Args:
        call: a bound method, to which only a weak reference is kept.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = weakref.WeakMethod(call)

    def __call__(self, *args: Any) -> None:
        """Calls the method, unless Dynamo is compiling or the method's object is gone."""
        if not torch.compiler.is_compiling() and (call := self._call()) is not None:
            call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as a builtin callable that takes any arguments and returns None."""
        return getattr, (contextlib.nullcontext(), "__exit__")
