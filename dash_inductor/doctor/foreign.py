"""Checks that attention of other libraries is called with its own determinism switched on.

These libraries do not read PyTorch's determinism flag when their attention runs.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .findings import Check, Seen, Severity
from .flag import Flag
from .reading import Place

OK, NOTE, WARNING, ERROR = Severity

VARIABLE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
"""The environment variable of TransformerEngine's own determinism flag."""


class Foreign:
    """Records the argument `deterministic` of other libraries' attention calls, or the flag when a layer is made."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, Place], set[bool]] = {}
        self._made: weakref.WeakKeyDictionary[nn.Module, tuple[str, bool]] = weakref.WeakKeyDictionary()
        self._deaf: dict[tuple[str, str, str], None] = {}
        self._heard: dict[str, None] = {}
        self.checks: tuple[Check, ...] = (self.flag_at_attention,)

    def function(self, function: type[torch.autograd.Function], args: Any, kwargs: Any, place: Place) -> None:
        """Records the argument `deterministic` of an autograd function for attention that is about to run."""
        value = argument(function, args, kwargs)
        if value is not None:
            self.told(f"{function.__module__}.{function.__name__}", place, value)

    def told(self, name: str, place: Place, value: bool) -> None:
        """Records the value of the argument `deterministic` in a call of a function or operator."""
        self._told.setdefault((name, place), set()).add(value)

    def made(self, layer: nn.Module, line: str) -> None:
        """Records that a TransformerEngine layer is about to be made, and whether determinism is requested now.

        Later changes of the determinism flag do not affect the layer.
        """
        told = Flag.now() is not Flag.OFF or os.environ.get(VARIABLE) == "0"
        self._made.setdefault(layer, (line, told))

    def ran(self, layer: nn.Module, line: str) -> None:
        """Records that a TransformerEngine layer is about to run; layers inside another one do not count."""
        made, told = self._made.get(layer, ("", True))
        if not made:
            return
        name = f"{type(layer).__module__}.{type(layer).__name__}"
        if told:
            self._heard[name] = None
        else:
            self._deaf[name, line, made] = None

    def at(self, module: str) -> list[str]:
        """Describes the calls of other libraries' attention in a module, each with its argument `deterministic`."""
        return [
            f"{name} at {place.line} ({' and '.join(f'deterministic={value}' for value in sorted(values))})"
            for (name, place), values in self._told.items()
            if place.inside(module)
        ]

    def flag_at_attention(self) -> Iterator[Seen]:
        """Yields a finding for each call of another library's attention: whether it was given deterministic=True.

        For layers that read the determinism flag only when they are made, the finding says whether it was set then.
        """
        functions = {(place, *values) for (name, place), values in self._told.items() if "::" not in name}
        for (name, place), values in self._told.items():
            if "::" in name and (place, *values) in functions:
                continue  # the operator that the function calls
            if False in values:
                what = f"{name} {place} was given deterministic=False: PyTorch's flag does not reach it"
                yield WARNING, what, "Give it deterministic=True, or compile what calls it, where it is replaced."
            else:
                what = f"{name} {place} was given deterministic=True; whether its kernel heeds that, two runs tell"
                yield OK, what, ""
        for name, line, made in self._deaf:
            what = (
                f"{name}, which runs at {line}, was made at {made} while deterministic algorithms were off and "
                f"{VARIABLE}=0 was not set: it asks when it is made, if its version asks for PyTorch's flag at all"
            )
            yield WARNING, what, f"export {VARIABLE}=0, and set the flag before the model is made."
        for name in self._heard:
            yield OK, f"{name} was made after its flag or PyTorch's was set", ""


def argument(function: type[torch.autograd.Function], args: Any, kwargs: Any) -> bool | None:
    """The value of the argument `deterministic` in a call of an autograd function; None if the function lacks it."""
    try:
        parameters = dict(inspect.signature(function.forward).parameters)
    except (TypeError, ValueError):
        return None
    parameter = parameters.get("deterministic")
    if parameter is None:
        return None
    names = list(parameters)
    if function.setup_context is torch.autograd.Function.setup_context:
        names = names[1:]  # the context
    value = (dict(zip(names, args, strict=False)) | kwargs).get("deterministic", parameter.default)
    return None if value is inspect.Parameter.empty else bool(value)
