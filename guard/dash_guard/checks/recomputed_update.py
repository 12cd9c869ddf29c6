"""Same-rank recompute of the update: some parameters are updated again from copies, and must get the same bits.

Replicas can show which rank's update is wrong only if there are more than two; this check needs no replica. Copies of
parameters, gradients and state take memory, so each step copies only what fits into `BYTES`, and parameters take turns.
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
from .same_rank_recompute import chosen
from .state import State, lanes_of, local

BYTES = 64 << 20
"""The largest size of all copies of a rank at a time, in bytes; a larger tensor is not copied."""

_ALONE = frozenset({"adam", "adamw", "adamax", "nadam", "radam", "sgd", "rmsprop", "adagrad", "adadelta"})
"""Modules of `torch.optim` whose optimizers update each parameter independently of the others."""


class Value(NamedTuple):
    """The digest of a tensor that an update has written.

    Attributes:
        name: the name of the parameter.
        key: the key in the parameter's optimizer state, such as ``exp_avg``; "" for the parameter itself.
        value: the digest, 16 hexadecimal digits.
    """

    name: str
    key: str
    value: str


class RecomputedUpdate(Check):
    """A check that runs the update of some parameters again after an optimizer has stepped.

    Args:
        rank: the rank that this check belongs to.
        same_rank_recompute: the share of steps in which it runs, in percent, from 0 to 100.
        seed: the seed by which these steps are chosen.
    """

    name = "same_rank_recompute"

    def __init__(self, rank: Host, same_rank_recompute: int = 0, seed: int = 0, **settings: Any) -> None:
        super().__init__(rank, **settings)
        self._share, self._seed = same_rank_recompute, seed
        self._preflight_done, self._off = set[int](), set[int]()  # optimizers
        self._next: dict[int, int] = {}  # the first parameter of the next part, by optimizer
        self._copies: dict[int, Copies] = {}

    def step_began(self, step: int) -> None:
        """Drop copies that were left because an update was skipped."""
        self._copies.clear()

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy some parameters with their gradients and optimizer state, in the steps that are chosen."""
        key = id(optimizer)
        if not chosen(self._seed, self.rank.step, self._share) or key in self._off or in_backward():
            return
        module = type(optimizer).__module__.rpartition("torch.optim.")[2]
        if module not in _ALONE or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self._end(optimizer, "are not run again: only those of PyTorch that update each parameter by itself")
            return
        named = [(n, p) for n, p in State.of(self.rank).names.of_parameters(optimizer) if _size(optimizer, p)]
        start, free = self._next.get(key, 0) % max(1, len(named)), BYTES
        part: list[tuple[str, Tensor]] = []
        for name, parameter in (*named[start:], *named[:start]):
            free -= _size(optimizer, parameter)
            if free < 0:
                break
            part.append((name, parameter))
        self._next[key] = start + max(1, len(part))
        if part:
            self._copies[key] = Copies(optimizer, part)
        if len(part) < len(named):
            self.rank.coverage.unseen(self.name, f"updates beyond {BYTES >> 20} MiB of a step", len(named) - len(part))

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the update again on the copies, and compare with what the optimizer has written."""
        copies = self._copies.pop(id(optimizer), None)
        if copies is None:
            return
        once, again = copies.now(), copies.updated()
        self.rank.coverage.count(self.name, updates=len(copies.names))
        place = next((n for n, values in enumerate(zip(once, again, strict=True)) if len(set(values)) > 1), None)
        if place is None or id(optimizer) not in self._preflight_done:
            self._preflight_done.add(id(optimizer))
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
        """Drop all copies of parameters, gradients and state."""
        self._copies.clear()

    def _end(self, optimizer: torch.optim.Optimizer, why: str) -> None:
        self._off.add(id(optimizer))
        self.rank.coverage.unseen(self.name, f"updates of {type(optimizer).__name__} {why}")


class Copies:
    """Copies of parameters with their gradients and optimizer state, from before the optimizer steps.

    Attributes:
        names: the names of the parameters.
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
        """Digests of the parameters and optimizer state that the optimizer itself has written."""
        return list(self._values(self._parameters, self._optimizer.state))

    def updated(self) -> list[Value]:
        """Run the optimizer's step again on the copies, without hooks; return digests of their new values and state."""
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
    """Bytes of the copies of a parameter; 0 if it has no update or cannot be hashed."""
    if parameter.grad is None or parameter.grad.layout != torch.strided or why_unseen(local(parameter)):
        return 0
    tensors = [parameter, parameter.grad, *optimizer.state.get(parameter, {}).values()]
    return 2 * sum(local(t).numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
