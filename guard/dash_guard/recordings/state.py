"""Differences of what steps begin with besides tensors: what they are in words, and which tensors they can explain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dash_inductor.observers import phases

from ..observation.generators import difference
from ..observation.labels import GENERATOR, ORDER_OF_SETS, STRING_HASHES
from .file import Entry

_EPOCH = "epoch of "
_FROM = {
    GENERATOR: phases.INITIAL,
    STRING_HASHES: phases.INITIAL,
    _EPOCH: phases.INPUT,
    "data of ": phases.INPUT,
    "autocast on ": phases.ACTIVATION,
    "loss scale": phases.ACTIVATION_GRADIENT,
    "": phases.PARAMETER,  # settings and counters of optimizers and scalers
}
"""The first phase that depends on a state, by the beginning of its name."""

_ONLY_DATA = (STRING_HASHES,)  # what decides about the order of data and parameters, and about nothing behind
_MAY_LACK = (GENERATOR, _EPOCH, "data of ")  # a run uses them later than the other, or not at all
_NONE = "none"
_ORDER = tuple(phases.STAGES)


@dataclass(frozen=True)
class StateDifference:
    """A value of the state with which a step begins that differs between two runs.

    Attributes:
        step, rank: the first step from which on it differs in all steps, from 1, and the rank, from 0.
        name: its name, such as ``generator of device 0``.
        a, b: its values.
        what: how b differs from a, in words.
    """

    step: int
    rank: int
    name: str
    a: str
    b: str
    what: str


class States:
    """Follows the state of one rank in two runs, step by step.

    Args:
        rank: the rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._values: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
        self._used: set[str] = set()  # generators that have drawn between two steps of a run
        self._since: dict[str, int] = {}
        self._steps = {"a": 0, "b": 0}

    def step(self, number: int, a: list[Entry] | None, b: list[Entry] | None) -> None:
        """Take the state of the next step of both runs, None for a run that does not have the step."""
        for run, entries in (("a", a), ("b", b)):
            if entries is not None:
                self._steps[run] += 1
                now = {entry.name.tensor: entry.value for entry in entries if entry.name.phase == phases.STATE}
                before = self._values[run]
                self._used |= {name for name, value in now.items() if name in before and before[name] != value}
                self._values[run] = now
        if a is not None and b is not None:
            differing = _differing(self._values["a"], self._values["b"])
            self._since = {name: self._since.get(name, number) for name in differing}

    def differing(self, phase: str | None = None) -> list[StateDifference]:
        """The differences of the last step that can explain a difference in a phase; None: all that matter later.

        A generator that draws nothing between steps matters only while it is not known whether it does: in the first
        step of both runs. It comes last.
        """
        found = []
        for name, step in self._since.items():
            begin = next(start for start in _FROM if name.startswith(start))
            idle = (
                name.startswith(GENERATOR)
                and name not in self._used
                and (phase is None or max(self._steps.values()) > 1)
            )
            data = begin in _ONLY_DATA and phase not in (phases.INITIAL, phases.INPUT)
            early = phase is not None and _ORDER.index(phase) < _ORDER.index(_FROM[begin])
            if not (idle or data or early):
                found.append(self._difference(name, step))
        return sorted(found, key=lambda each: each.name.startswith(GENERATOR) and each.name not in self._used)

    def _difference(self, name: str, step: int) -> StateDifference:
        a, b = (self._values[run].get(name, _NONE) for run in "ab")
        return StateDifference(step, self._rank, name, _shown(a), _shown(b), what(name, a, b))


def _differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The names of values that differ; of generators and data, those that both runs have."""
    if not a or not b:  # as recordings of version 1
        return []
    both = [name for name in {**a, **b} if (name in a and name in b) or not name.startswith(_MAY_LACK)]
    return [name for name in both if a.get(name, _NONE) != b.get(name, _NONE)]


def what(name: str, a: Any, b: Any) -> str:
    """How a value of state in run b differs from that in run a, in words."""
    if name == STRING_HASHES:
        return f"string hashes differ, {ORDER_OF_SETS}: set PYTHONHASHSEED to a number"
    if name.startswith(GENERATOR) and isinstance(a, str) and isinstance(b, str):
        return f"{name} {difference(a, b)}"
    if name.startswith(_EPOCH) and type(a) is int and type(b) is int and b < a:
        return f"epoch {b} is read again: {name} {b} instead of {a}"
    return f"{name} {_shown(b)} instead of {_shown(a)}"


def sentence(differences: list[StateDifference]) -> str:
    """Differences as one sentence; "" for none."""
    words = "; ".join(dict.fromkeys(each.what for each in differences))
    return f"The state with which the step begins differs: {words}." if words else ""


def _shown(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return str(int(value))
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
