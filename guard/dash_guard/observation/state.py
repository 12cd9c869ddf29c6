"""What a training step begins with besides the tensors of the model: all that a checkpoint must bring back.

Names of state, and what it is:

generator of the CPU, device 0, ..., random, numpy   see `generators`
string hashes                                        what PYTHONHASHSEED decides
autocast on cpu, cuda                                the dtype of autocast around the forward
epoch of DistributedSampler                          of samplers and data sets that count epochs
data of StatefulDataLoader ...                       a value of the `state_dict` of a data loader
AdamW.0 lr                                           a setting of a group of parameters of an optimizer
steps of AdamW                                       the steps that its state has counted
loss scale, steps since the loss scale grew          of a `GradScaler`
"""

from __future__ import annotations

import gc
import hashlib
import math
import random
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dash_inductor.errors import described

from ..fingerprints.arriving import Arriving
from ..fingerprints.fingerprint import local, why_unseen
from ..upstream.generators import mt19937_of_cpu, philox_of_devices
from . import generators
from .environment import string_hashes
from .labels import GENERATOR, STRING_HASHES
from .optimizers import OptimizerNames, settings

Value = str | int | float | bool | None | Arriving
"""A value of state; one that is on a device arrives later."""

_TEXT = 200  # characters of a text
_VALUES = 200  # values of the state of a data loader
_PARTS = ("sampler", "batch_sampler", "dataset")  # of a data loader or a sampler, which may count epochs


class State:
    """Reads the state of one training process.

    Args:
        data: objects with a `state_dict`, whose state is read; None: the data loaders of PyTorch that are alive when
            the state is first read, and those that have taken the place of one of them.
    """

    def __init__(self, data: Sequence[Any] | None = None) -> None:
        self._data = None if data is None else list(data)
        self._loaders: list[weakref.ref[Any]] = []
        self._searched = False
        self._optimizers = OptimizerNames()
        self._scalers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def of_forward(self) -> dict[str, Value]:
        """The state that a forward begins with: generators, and where the data are."""
        return {**generators_now(), STRING_HASHES: string_hashes(), **_autocast(), **self._of_data()}

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Value]:
        """The state that an optimizer steps with: settings of its groups of parameters, and its count of steps."""
        kind, found = self._optimizers.name(optimizer), dict[str, Value]()
        for number, group in enumerate(optimizer.param_groups):
            for key, value in settings(group):
                if (plain := _plain(value)) is not _OTHER:
                    found[f"{kind}.{number} {key}"] = plain
        for state in optimizer.state.values():
            if isinstance(state, dict) and "step" in state and (plain := _plain(state["step"])) is not _OTHER:
                found[f"steps of {kind}"] = plain
                break
        return found

    def of_scaler(self, scaler: torch.amp.GradScaler) -> dict[str, Value]:
        """The scale of the loss in the present step, and in how many steps before it no gradient has overflowed."""
        number = self._scalers.setdefault(scaler, len(self._scalers) + 1)
        end = "" if number == 1 else f" ({number})"
        state = {"loss scale": "_scale", "steps since the loss scale grew": "_growth_tracker"}
        return {name + end: _plain(getattr(scaler, key)) for name, key in state.items()}

    def _of_data(self) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for each in self._data if self._data is not None else self._loaders_alive():
            for name, epoch in _epochs(each):
                _add(found, f"epoch of {name}", epoch)
            if callable(getattr(each, "state_dict", None)) and not _would_begin(each):
                for path, value in _of_state_dict(each):
                    _add(found, f"data of {type(each).__name__}{path}", value)
        return found

    def _loaders_alive(self) -> list[Any]:
        """The data loaders of the program; objects are searched for them once, and again after one has gone."""
        alive = [loader for reference in self._loaders if (loader := reference()) is not None]
        if not self._searched or len(alive) < len(self._loaders):
            self._searched = True
            found = [thing for thing in gc.get_objects() if issubclass(type(thing), DataLoader)]
            alive = sorted(found, key=lambda loader: type(loader.dataset).__name__)
            self._loaders = [weakref.ref(loader) for loader in alive]
        return alive


def arrived(value: Value) -> str | int | float | bool | None:
    """A value of state as plain value for JSON; waits for one that is on a device."""
    number: Any = value.numbers().item() if isinstance(value, Arriving) else value
    return str(number) if isinstance(number, float) and not math.isfinite(number) else number


def generators_now() -> dict[str, str]:
    """The states of the generators of PyTorch, `random` and, if it is loaded, NumPy, by name."""
    found = {f"{GENERATOR}the CPU": generators.mt19937(*mt19937_of_cpu())}
    for index, seed, offset in philox_of_devices():
        found[f"{GENERATOR}device {index}"] = generators.philox(seed, offset)
    _, (*words, index), _ = random.getstate()
    found[f"{GENERATOR}random"] = generators.mt19937(words, index)
    numpy: Any = sys.modules.get("numpy.random")
    state = None if numpy is None else numpy.get_state()
    if state is not None and state[0] == "MT19937":
        found[f"{GENERATOR}numpy"] = generators.mt19937(state[1].tolist(), int(state[2]))
    return found


def _autocast() -> dict[str, Value]:
    return {
        f"autocast on {kind}": str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    }


def _epochs(loader: Any) -> Iterator[tuple[str, int]]:
    """The epochs that parts of a data loader count, each with the class of the part."""
    parts, seen = [loader], set[int]()
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if type(epoch := getattr(part, "epoch", None)) is int:
            yield type(part).__name__, epoch
        parts += [inner for name in _PARTS if (inner := getattr(part, name, None)) is not None]


def _would_begin(data: Any) -> bool:
    """Whether `state_dict` would begin to read: that of torchdata starts workers and draws their seed."""
    stateful = any(kind.__module__.partition(".")[0] == "torchdata" for kind in type(data).__mro__)
    return stateful and getattr(data, "_iterator", data) is None


def _of_state_dict(data: Any) -> Iterator[tuple[str, Value]]:
    """The values in a state that a data loader gives, each with its path; a text instead if it gives none."""
    try:
        leaves = list(_leaves(data.state_dict(), ""))
    except Exception as error:
        yield "", f"unknown: {described(error)}"[:_TEXT]
        return
    yield from leaves[:_VALUES]
    if len(leaves) > _VALUES:
        yield f" beyond {_VALUES} values", _digest(repr(leaves[_VALUES:]).encode())


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Value]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{path} {key}"[:_TEXT])
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{path} {number}"[:_TEXT])
    elif (plain := _plain(value)) is not _OTHER:
        yield path, plain
    elif isinstance(value, Tensor):
        yield path, _digest(repr(value.tolist()).encode())
    else:
        yield path, _digest(value if isinstance(value, bytes) else repr(value).encode())


_OTHER = ()
"""Stands for a value that is no number, text or tensor of one element."""


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else str(value)[:_TEXT]
    if isinstance(value, str):
        return value if len(value) <= _TEXT else _digest(value.encode())
    if isinstance(value, Tensor) and value.numel() == 1 and not why_unseen(plain := local(value).detach()):
        return Arriving(plain.double() if plain.is_floating_point() else plain)
    if isinstance(value, (list, tuple)) and all(isinstance(part, (bool, float, int, str)) for part in value):
        return str(tuple(value))[:_TEXT]
    return _OTHER


def _add(found: dict[str, Value], name: str, value: Value) -> None:
    number = 1
    while (numbered := name if number == 1 else f"{name} ({number})") in found:
        number += 1
    found[numbered] = value


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
