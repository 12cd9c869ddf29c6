"""Learns which ranks hold a tensor with equal bits where the program does not declare it.

These are the ranks whose digests were equal while the value changed in three steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..report.findings import Finding
from ..shared.class_names import LEARNED, LENGTH, spelled
from ..shared.roots import STAGES, VALUE
from ..transport.messages import Message
from .detector import Detector, Job

CHANGES = 3
"""The number of steps in which a value must have changed and been equal before ranks count as replicas."""

_NAMES = 1 << 12  # tensors at most
_PAGE = 200  # names of a message
_STEPS = 64
_AT_ONCE = 40_000  # values of ranks that one call of `detect` compares
_SIZE = 2 * VALUE

Key = tuple[str, str]  # stage and name


class Learned(Detector):
    """Infers from short digests of tensors which ranks are replicas, and tells each set of replicas to its ranks.

    Ranks count as replicas of a tensor if their digests stayed equal while the value changed in three steps. The
    detector itself returns no findings.
    """

    kinds = frozenset({"bits"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job)
        self._names: dict[tuple[int, str, int], list[str]] = {}  # by rank, stage and first
        self._values: dict[Key, dict[int, dict[int, str]]] = {}  # by step and rank
        self._history: dict[Key, dict[int, list[str]]] = {}
        self._classes: dict[Key, None] = {}

    def take(self, message: Message, now: float) -> None:
        """Take a rank's short digests of a page of tensors, with the names if the page is new."""
        stage, first, values = (message.body.get(key) for key in ("stage", "first", "values"))
        if stage not in STAGES or type(first) is not int or not isinstance(values, str):
            return
        names = message.body.get("names")
        if isinstance(names, list) and all(isinstance(name, str) for name in names) and 0 <= first < _NAMES:
            self._names[message.rank, stage, first] = names
        for number, name in enumerate(self._names.get((message.rank, stage, first), [])):
            value = values[_SIZE * number : _SIZE * (number + 1)]
            key = stage, name
            if len(value) != _SIZE or value[0] == "-" or key in self._classes:
                continue
            if key not in self._values and len(self._values) >= _NAMES * len(STAGES):
                continue
            steps = self._values.setdefault(key, {})
            steps.setdefault(message.step, {})[message.rank] = value
            if len(steps) > _STEPS:
                del steps[min(steps)]

    def detect(self, now: float) -> list[Finding]:
        """Send the sets of replicas that are certain enough to their ranks; returns an empty list of findings."""
        learned: dict[tuple[str, str], list[str]] = {}
        for (stage, name), ranks in list(self._certain()):
            if len(of := LEARNED + spelled(ranks)) <= LENGTH:
                learned.setdefault((stage, of), []).append(name)
        for (stage, of), names in learned.items():
            ranks_ = self._ranks[of]
            for start in range(0, len(names), _PAGE):
                body = {"stage": stage, "classes": {of: names[start : start + _PAGE]}}
                self.job.orders.append((ranks_, Message("bits", 0, 0, body)))
        return []

    def _certain(self) -> Iterator[tuple[Key, tuple[int, ...]]]:
        self._ranks: dict[str, tuple[int, ...]] = {}
        left = _AT_ONCE
        for key in list(self._values):
            if left <= 0:
                break
            steps = self._values[key]
            for step in sorted(steps):
                if len(steps[step]) < self.job.world and max(steps) < step + 3:
                    break  # messages of other ranks may still arrive
                left -= len(steps[step])
                for rank, value in steps.pop(step).items():
                    seen = self._history.setdefault(key, {}).setdefault(rank, [])
                    if not seen or seen[-1] != value:
                        seen.append(value)
            history = self._history.get(key, {})
            if not history or min(map(len, history.values())) <= CHANGES:
                continue
            self._classes[key] = None
            left -= len(history)
            del self._values[key], self._history[key]
            groups: dict[tuple[str, ...], list[int]] = {}
            for rank in sorted(history):
                groups.setdefault(tuple(history[rank]), []).append(rank)
            for group in groups.values():
                if len(group) > 1:
                    self._ranks[LEARNED + spelled(group)] = tuple(group)
                    yield key, tuple(group)
