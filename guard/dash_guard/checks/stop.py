"""Ends training on all ranks together, before parameters change, for ``on_confirmed="raise"``.

Two things end training: a confirmed finding of the monitor, and tensors that differ although all ranks of the job are
declared to hold them with equal bits. Ranks learn of both by one maximum over some numbers
(`process.group.Group.highest`): the maxima of a root and of its complement are complements of each other only if all
roots are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dash_inductor.observers import phases
from dash_inductor.upstream.eager import in_backward

from ..detectors.wording import named, ranks
from ..errors import FaultConfirmedError
from ..shared.votes import first_difference, groups, minority
from ..transport.messages import Message
from .check import Check, Host
from .digests import Leaves
from .replicas import Replicas
from .state import Entry, Hashed, State

_STAGES = (phases.GRADIENT, phases.PARAMETER, phases.OPTIMIZER_STATE)
"""The stages that are at rest between the backward and the update, so that they can be hashed a second time."""


class Stop(Check):
    """A check that lets all ranks decide together, before every update, whether training ends.

    It runs last, and waits for the device. Without a group of all ranks it is off (`process.rank.Rank`): a rank that
    stopped alone would make the others wait.

    Args:
        rank: the rank that this check belongs to.
        replicas: the check that hashes the tensors that must be equal on several ranks; None: only findings of the
            monitor end training.
    """

    name = "stop"
    together = True

    def __init__(self, rank: Host, replicas: Replicas | None = None, **settings: Any) -> None:
        super().__init__(rank, **settings)
        self._confirmed, self._ended = "", False
        self._asked = 0
        self._replicas = replicas
        if replicas is not None:
            replicas.kept = []

    def order(self, message: Message) -> None:
        """Note that the monitor has confirmed a fault; the next update raises an error."""
        self._confirmed = str(message.body.get("sentence", "the guard has confirmed a fault"))

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise an error on all ranks if any rank has a reason to; this happens once in a program that catches it.

        Raises:
            FaultConfirmedError: the monitor has confirmed a fault, or ranks that must hold equal bits do not.
        """
        step = self.rank.step
        if self._asked == step or self._ended:
            return
        self._asked = step
        if in_backward():
            self.rank.coverage.unseen(self.name, "the optimizer steps within the backward")
            return
        parts = [] if self._replicas is None else self._replicas.taken()
        mine = self._leaves(parts)
        numbers = [number for stage in _STAGES for number in (mine[stage].which(), mine[stage].number())]
        confirmed, *found = self.rank.group.highest([bool(self._confirmed), *numbers, *(~number for number in numbers)])
        agree = [high == ~low for high, low in zip(found[: len(numbers)], found[len(numbers) :], strict=True)]
        self.rank.coverage.count(self.name, steps=1)
        if confirmed:
            self._ended = True
            raise FaultConfirmedError(self._confirmed or f"step {step}: another rank received a confirmed finding")
        for stage, which, root in zip(_STAGES, agree[::2], agree[1::2], strict=True):
            if not which:
                self.rank.coverage.unseen(self.name, f"{stage}: ranks have different tensors of this stage")
            elif not root:
                self._differ(step, stage, parts)

    def _differ(self, step: int, stage: str, parts: Sequence[Hashed]) -> None:
        """Hash a second time after roots have differed, so that no error of a message or of the hash ends training."""
        entries = [entry for part in parts for entry in part.entries if self._is_of_all(entry)]
        now = State.of(self.rank).hash(self.name, [entry for entry in entries if entry.stage == stage])
        leaves = self._leaves(now)[stage]
        rows = dict(enumerate(self.rank.group.gather_padded(leaves.numbers())))
        place = first_difference(rows, [list(rows)])
        if place is None:
            self.rank.coverage.unseen(self.name, "ranks that differed at first and agree in a second hash")
            return
        apart = groups({rank: row[place] if place < len(row) else None for rank, row in rows.items()})
        few = minority(apart)
        others = [rank for rank in rows if rank not in few]
        who = f"{ranks(few)} and {ranks(others)}" if few else " and ".join(map(ranks, apart))
        names = leaves.labels.names
        what = named(stage, names[place]) if place < len(names) else stage
        self._ended = True
        raise FaultConfirmedError(f"step {step}: {who} must be equal, and differ in {what}")

    def _is_of_all(self, entry: Entry) -> bool:
        return len(entry.ranks) == self.rank.world > 1

    def _leaves(self, parts: Iterable[Hashed]) -> dict[str, Leaves]:
        """The leaves of what all ranks must hold, by stage; waits for the device."""
        rows: dict[str, list[tuple[str, str, bytes]]] = {stage: [] for stage in _STAGES}
        for part in parts:
            lanes = part.lanes.cpu().numpy().tobytes()
            for row, (entry, described) in enumerate(zip(part.entries, part.descriptions, strict=True)):
                if entry.stage in rows and self._is_of_all(entry):
                    rows[entry.stage].append((entry.name, described, lanes[16 * row : 16 * row + 16]))
        return {stage: Leaves.of(found) for stage, found in rows.items()}
