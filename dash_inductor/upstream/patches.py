"""Attributes that are others inside a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_NONE = object()


@contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Give attributes of a module or class other values inside the block; one that was not there is gone afterwards."""
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
