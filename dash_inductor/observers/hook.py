"""A hook on a module of the program, which copies of the module do not take along."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch


class Hook:
    """Calls a method of ours in eager code.

    A copy of it, in a copy of the module or in a file, does nothing, and needs nothing of this package.

    Args:
        call: a bound method, which is not kept alive.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = weakref.WeakMethod(call)

    def __call__(self, *args: Any) -> None:
        """Called by the module."""
        if not torch.compiler.is_compiling() and (call := self._call()) is not None:
            call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Something of Python's own that takes any arguments and gives None."""
        return getattr, (contextlib.nullcontext(), "__exit__")
