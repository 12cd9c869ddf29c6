"""A context manager that replaces attributes of modules and classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_NONE = object()


@contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """A context manager that sets attributes of a module or class; on exit it restores them, or deletes new ones."""
    before = {name: vars(owner).get(name, _NONE) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _NONE:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
