"""Replay of the update: some parameters are updated a second time, from copies, and must become the same.

An optimizer that writes something wrong is seen by replicas, where there are more than two.  This needs none.  Copies
of parameters, gradients and state take memory: each step has as many of them as fit into `BYTES`, by turns.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_inductor.observers import phases
from dash_inductor.upstream.eager import in_backward

from ..fingerprints.fingerprint import description, digest, why_unseen
from .check import Check, Host
from .replay import chosen
from .state import State, lanes_of, local

BYTES = 64 << 20
"""Of copies at a time in a rank; a tensor that is larger is not copied."""

_ALONE = frozenset({"adam", "adamw", "adamax", "nadam", "radam", "sgd", "rmsprop", "adagrad", "adadelta"})
"""Modules of `torch.optim` whose optimizers update each parameter by itself."""


class Value(NamedTuple):
    """What an update has made.

    Attributes:
        name: of the parameter.
        key: of its state, "" for the parameter itself.
        value: 16 hexadecimal digits.
    """

    name: str
    key: str
    value: str


class ReplayedUpdate(Check):
    """Repeats the update of a part of the parameters.

    Args:
        rank: of which this is a check.
        replay: in how many of 100 steps, from 0 to 100.
        seed: of the choice of steps.
    """

    name = "replay"

    def __init__(self, rank: Host, replay: int = 0, seed: int = 0, **settings: Any) -> None:
        super().__init__(rank, **settings)
        self._share, self._seed = replay, seed
        self._licensed, self._off = set[int](), set[int]()  # optimizers
        self._next: dict[int, int] = {}  # the first parameter of the next part, by optimizer
        self._copies: dict[int, Copies] = {}

    def step_began(self, step: int) -> None:
        """Copies of a step that was skipped are of no use."""
        self._copies.clear()

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy what the update depends on."""
        key = id(optimizer)
        if not chosen(self._seed, self.rank.step, self._share) or key in self._off or in_backward():
            return
        module = type(optimizer).__module__.rpartition("torch.optim.")[2]
        if module not in _ALONE or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self._end(optimizer, "are not run again: only those of PyTorch that update each parameter by itself")
            return
        named = [(n, p) for n, p in State.of(self.rank).names.of_parameters(optimizer) if _size(optimizer, p)]
        start, room = self._next.get(key, 0) % max(1, len(named)), BYTES
        part: list[tuple[str, Tensor]] = []
        for name, parameter in (*named[start:], *named[:start]):
            room -= _size(optimizer, parameter)
            if room < 0:
                break
            part.append((name, parameter))
        self._next[key] = start + max(1, len(part))
        if part:
            self._copies[key] = Copies(optimizer, part)
        if len(part) < len(named):
            self.rank.coverage.unseen(self.name, f"updates beyond {BYTES >> 20} MiB of a step", len(named) - len(part))

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the update again, and compare."""
        copies = self._copies.pop(id(optimizer), None)
        if copies is None:
            return
        once, again = copies.now(), copies.updated()
        self.rank.coverage.count(self.name, updates=len(copies.names))
        place = next((n for n, values in enumerate(zip(once, again, strict=True)) if len(set(values)) > 1), None)
        if place is None or id(optimizer) not in self._licensed:
            self._licensed.add(id(optimizer))
            if place is not None:
                self._end(optimizer, "do not repeat their bits")
            return
        third = copies.updated()
        name, state, _ = once[place]
        self.send(
            self.rank.step,
            off="",
            phase=phases.OPTIMIZER_STATE if state else phases.PARAMETER,
            tensor=f"{name} {state}".strip()[:200],
            once=once[place].value,
            again=again[place].value,
            third=third[place].value,
        )

    def close(self) -> None:
        """Keep nothing."""
        self._copies.clear()

    def _end(self, optimizer: torch.optim.Optimizer, why: str) -> None:
        self._off.add(id(optimizer))
        self.rank.coverage.unseen(self.name, f"updates of {type(optimizer).__name__} {why}")


class Copies:
    """Parameters of an optimizer with their gradients and states, as they were before it has stepped.

    Attributes:
        names: of the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, part: list[tuple[str, Tensor]]) -> None:
        self.names = [name for name, _ in part]
        self._optimizer, self._parameters = optimizer, [parameter for _, parameter in part]
        self._gradients = [_clone(parameter.grad) for parameter in self._parameters]
        self._before = [_clone(parameter) for parameter in self._parameters]
        self._states = [
            {key: _clone(value) for key, value in optimizer.state.get(parameter, {}).items()}
            for parameter in self._parameters
        ]

    def now(self) -> list[Value]:
        """What the optimizer has made of them."""
        return list(self._values(self._parameters, self._optimizer.state))

    def updated(self) -> list[Value]:
        """What it makes of copies: the same class with the same settings, and without hooks."""
        again = copy.copy(self._optimizer)
        for name in vars(again).copy():
            if name.startswith("_optimizer_") and isinstance(getattr(again, name), OrderedDict):
                setattr(again, name, OrderedDict())
        copies = {id(p): _clone(before) for p, before in zip(self._parameters, self._before, strict=True)}
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            copies[id(parameter)].grad = _clone(gradient)
        again.param_groups = [
            {**group, "params": [copies[id(p)] for p in group["params"] if id(p) in copies]}
            for group in self._optimizer.param_groups
        ]
        again.state = defaultdict(dict)
        for parameter, state in zip(self._parameters, self._states, strict=True):
            if state:
                again.state[copies[id(parameter)]] = {key: _clone(value) for key, value in state.items()}
        with torch.no_grad():
            inspect.unwrap(type(again).step)(again)
        return list(self._values([copies[id(p)] for p in self._parameters], again.state))

    def _values(self, parameters: list[Tensor], states: Any) -> Iterator[Value]:
        rows = [
            (name, key, local(tensor).detach())
            for name, parameter in zip(self.names, parameters, strict=True)
            for key, tensor in (("", parameter), *sorted((states.get(parameter) or {}).items()))
            if isinstance(tensor, Tensor)
        ]
        for device in {tensor.device: None for _, _, tensor in rows}:
            here = [row for row in rows if row[2].device == device]
            for (name, key, tensor), (low, high) in zip(here, lanes_of([t for *_, t in here]).tolist(), strict=True):
                yield Value(name, key, digest(low, high, description(tensor)).hex()[:16])


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


def _size(optimizer: torch.optim.Optimizer, parameter: Tensor) -> int:
    """Bytes of what is copied, with the copies that are updated; 0 for what has no update, or cannot be hashed."""
    if parameter.grad is None or parameter.grad.layout != torch.strided or why_unseen(local(parameter)):
        return 0
    tensors = [parameter, parameter.grad, *optimizer.state.get(parameter, {}).values()]
    return 2 * sum(local(t).numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
