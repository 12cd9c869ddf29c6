"""Hashes frozen parameters: those of models that have run, which no optimizer updates.

They are hashed when they are first seen and whenever PyTorch has written them, so that weights that nobody writes cost
one pass in the whole run. Writes past PyTorch's version counters are left to `at_rest`.
"""

from __future__ import annotations

from dataclasses import replace

from ..shared.roots import FROZEN
from .state import Entry, Hashed, State, local, mark, picked


class Frozen:
    """The frozen parameters that several ranks must hold with equal bits, with their last hashes.

    Args:
        state: the training state of the rank.
        check: the name of the check whose coverage counts what cannot be hashed.

    Attributes:
        written: how often the program has written a parameter since it was first seen.
    """

    def __init__(self, state: State, check: str) -> None:
        self._state, self._check = state, check
        self._seen: dict[int, tuple[Entry, tuple[int, int]]] = {}  # with its mark, by the id of the tensor
        self._hashed: list[Hashed] = []
        self.written = 0

    def hashes(self) -> list[Hashed]:
        """The hashes of frozen parameters after a step, without those that are seen for the first time.

        A forward may write a parameter in the step in which this rank sees it first, so its hash waits for a step.
        """
        before, self._seen = self._seen, {}
        kept, changed = set(), []
        hashed = {id(entry) for part in self._hashed for entry in part.entries}
        for entry in self._state.frozen():
            tensor = entry.tensor()
            if tensor is None or len(entry.ranks) < 2:
                continue
            now = mark(local(tensor), tensor)
            known, then = before.get(id(tensor), (entry, now))
            if known is entry or known.tensor() is not tensor:
                self._seen[id(tensor)] = replace(entry, stage=FROZEN), now
                continue
            self._seen[id(tensor)] = known, now
            self.written += then != now
            if then == now and id(known) in hashed:
                kept.add(id(known))
            else:
                changed.append(known)
        self._hashed = picked(self._hashed, kept) + self._state.hash(self._check, changed)
        return self._hashed
