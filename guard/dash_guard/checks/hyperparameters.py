"""Hashes the settings of optimizers: learning rates and other hyperparameters of their parameter groups.

All ranks that update shards of the same parameters must have equal settings, even where no two ranks hold the same
shard, and must step after equally many reductions of gradients. Numbers and strings are hashed on the host; tensors,
such as a learning rate on a GPU, are hashed like all other state.
"""

from __future__ import annotations

import functools
import hashlib
import numbers
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..fingerprints.sizes import LANES
from ..observation.optimizers import OptimizerNames, settings
from ..shared.roots import REDUCTIONS, SETTING
from .state import Entry, Hashed, State

GROUPS = 256
"""The largest number of parameter groups of an optimizer that are hashed."""

_LONGEST = 16  # parts of a setting
_LENGTH = 200  # characters of a text


class Hyperparameters:
    """Hashes the settings of all optimizers of a rank.

    Args:
        state: says which ranks must have equal settings.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._names = OptimizerNames()

    def of(self, check: str, optimizer: torch.optim.Optimizer) -> list[Hashed]:
        """Hash the settings of an optimizer that has just stepped; never waits for a device.

        Args:
            check: the check whose coverage counts settings that cannot be hashed.
            optimizer: the optimizer.

        Returns:
            The hashes of the settings: one `Hashed` for numbers and strings, and one for the tensors on each device.
        """
        hashed, tensors, digests = Hashed(), list[Entry](), list[bytes]()
        for name, value, ranks in self._settings(check, optimizer):
            if isinstance(value, Tensor):
                tensors.append(Entry(SETTING, name, weakref.ref(value), ranks))
            elif (content := _content(value)) is not None:
                hashed.entries.append(Entry(SETTING, name, _nothing, ranks))
                hashed.descriptions.append("")
                digests.append(_digest(content))
            else:
                why = "optimizer settings that are no numbers, texts or tensors"
                self._state.rank.coverage.unseen(check, why)
        if digests:
            hashed.lanes = torch.from_numpy(np.frombuffer(b"".join(digests), np.int64).reshape(-1, LANES).copy())
        return [hashed, *self._state.hash(check, tensors)] if digests else self._state.hash(check, tensors)

    def _settings(self, check: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """The name, the value and the ranks of each setting."""
        kind = self._names.name(optimizer)
        groups, holders = optimizer.param_groups, self._state.holders(optimizer)
        if len(groups) > GROUPS:
            self._state.rank.coverage.unseen(check, f"settings of groups of parameters beyond {GROUPS}")
        for number, (group, ranks) in enumerate(zip(groups[:GROUPS], holders, strict=False)):
            for key, value in settings(group):
                yield f"{kind}.{number} {key}", value, ranks
        ranks = max(holders, key=len, default=())
        if count := self._state.reductions[ranks]:
            yield f"{kind} {REDUCTIONS}", count, ranks


def _nothing() -> None:
    """Stands for the tensor of a setting that is a number or a text."""


def _content(value: Any) -> str | None:
    """A text that identifies the value of a setting; None for a value of any other type."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, (float, int, numbers.Real)):  # the first two are known at once
        try:
            return float(value).hex()
        except OverflowError:
            return str(value)
    if isinstance(value, str):
        return repr(value[:_LENGTH])
    if isinstance(value, tuple | list) and len(value) <= _LONGEST:
        parts = [_content(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return None


@functools.lru_cache(maxsize=4096)
def _digest(content: str) -> bytes:
    return hashlib.blake2b(content.encode(), digest_size=8 * LANES).digest()
