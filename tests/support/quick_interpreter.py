"""Triton's interpreter looks through the whole language at every call of a function, for a third of its time: here it
looks once.
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def install() -> None:
    """Change the interpreter of this process, which has called nothing yet."""
    quick = {"getmembers": lambda package: [(name, getattr(package, name)) for name in _builtins(package)]}
    interpreter.inspect = SimpleNamespace(**{**vars(inspect), **quick})
