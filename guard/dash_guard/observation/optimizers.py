"""Names of optimizers, and the settings of their groups of parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

_NOT_SETTINGS = ("params", "param_names")


class OptimizerNames:
    """Names optimizers by their class, and those of equal class also by their order."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] = weakref.WeakKeyDictionary()
        self._kinds: dict[str, int] = {}

    def name(self, optimizer: torch.optim.Optimizer) -> str:
        """The name of an optimizer: ``AdamW``, ``AdamW(2)``, ..."""
        if optimizer not in self._names:
            kind = type(optimizer).__name__
            count = self._kinds[kind] = self._kinds.get(kind, 0) + 1
            self._names[optimizer] = kind if count == 1 else f"{kind}({count})"
        return self._names[optimizer]


def settings(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the settings of a group of parameters, such as `lr`, by name and sorted."""
    for key in sorted(group, key=str):
        if key not in _NOT_SETTINGS:
            yield str(key), group[key]
