"""What the names of tensors and of state say; imports no torch."""

from __future__ import annotations

import re

EVALUATION = " (evaluation"
"""Begins the end of the names of what is computed outside of training."""

GENERATOR = "generator of "
"""Begins the names of random number generators."""

STRING_HASHES = "string hashes"
"""The name of what PYTHONHASHSEED decides."""

ORDER_OF_SETS = "and with them the order of sets of strings"
"""What differs where string hashes do: the end of a sentence."""

_CALL = re.compile(r" \(call [0-9]+\)$")


def called(name: str, calls: int) -> str:
    """The name of a tensor that a step has for the time `calls`, from 1."""
    return name if calls == 1 else f"{name} (call {calls})"


def uncounted(name: str) -> str:
    """The name of a tensor without the number of its call: equal for all calls of a module in one mode."""
    return _CALL.sub("", name)
