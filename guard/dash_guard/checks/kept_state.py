"""Finds state that a program keeps itself, such as averaged weights, which no module that runs and no optimizer has.

Tensors of the shape and dtype of a parameter that live from one step to the next are taken for copies of it. They are
named by what they contain when they are found, so that a copy has the same name on all ranks that hold the same.
Whether ranks must hold it with equal bits is learned from its values, as for all state that is not declared.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from dash_inductor.observers import phases

from ..fingerprints.arriving import Arriving
from ..fingerprints.fingerprint import why_unseen
from .digests import short
from .state import Entry, lanes_of

COPIES = 2
"""The largest number of copies of each parameter that are compared."""

SEARCHES = frozenset({2, 16, 128, 1024})
"""The steps after which the program's objects are searched; that takes some 0.4 s for a million objects."""

_KINDS = (Tensor, nn.Parameter)
_NAMED = 2  # parameters in the name of a copy
_Kind = tuple[torch.Size, torch.dtype, torch.device]


class KeptState:
    """The state that the program of this rank keeps itself."""

    def __init__(self) -> None:
        self._found: list[tuple[str, list[weakref.ref[Tensor]], Arriving]] = []
        self._entries: list[Entry] = []

    def search(self, parameters: Sequence[tuple[str, Tensor]], known: Collection[int]) -> None:
        """Look through all objects of the program for copies of parameters.

        Args:
            parameters: parameters with their names.
            known: ids of tensors that are no copies, such as parameters, gradients, buffers and optimizer state.
        """
        names: dict[_Kind, list[str]] = {}
        for name, parameter in parameters:
            names.setdefault((parameter.shape, parameter.dtype, parameter.device), []).append(name)
        have = {id(entry.tensor()) for entry in self._entries}
        copies: dict[_Kind, list[Tensor]] = {}
        for each in gc.get_objects():
            if type(each) not in _KINDS or id(each) in known or id(each) in have or why_unseen(each):
                continue
            kind = each.shape, each.dtype, each.device
            if kind in names and each.numel() > 1 and each.grad_fn is None and _is_whole(each):
                copies.setdefault(kind, []).append(each)
        self._found = []
        for kind, tensors in copies.items():
            if len(tensors) <= COPIES * len(names[kind]):  # more are no copies, but something of the program's work
                more = f" or {len(names[kind]) - _NAMED} others" if len(names[kind]) > _NAMED else ""
                what = " or ".join(names[kind][:_NAMED]) + more
                self._found.append((what, [weakref.ref(tensor) for tensor in tensors], Arriving(lanes_of(tensors))))

    def settle(self) -> bool:
        """Take what a search has found and what is still there in the next step; returns whether there is any."""
        known = len(self._entries)
        found, self._found = self._found, []
        for what, references, arriving in found:
            if not arriving.here():
                self._found.append((what, references, arriving))
                continue
            for reference, lanes in zip(references, arriving.numbers(), strict=True):
                if reference() is not None:
                    name = f"copy {short(lanes.tobytes())[:8]} of {what} that the program keeps"
                    self._entries.append(Entry(phases.BUFFER, name, reference, ()))
        return len(self._entries) > known

    def entries(self) -> list[Entry]:
        """An `Entry` for each copy that is still there."""
        self._entries = [entry for entry in self._entries if entry.tensor() is not None]
        return self._entries


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor has a storage of its own, and is no part of another one."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes
