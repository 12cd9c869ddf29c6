"""Ends training in all ranks alike, before parameters change, for ``on_verdict="raise"``.

Two things do so: a verdict of the monitor, and tensors that all ranks of the job must have with equal bits, as far as
that is declared, and have not.  Ranks learn of both by one maximum over some numbers (`group.Group.highest`): of a root
and its complement, the maxima are complements of each other only if all roots are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dash_inductor.errors import GuardVerdict
from dash_inductor.observers import phases
from dash_inductor.upstream.eager import in_backward

from ..detectors.wording import named, ranks
from ..shared.votes import first_difference, groups, minority
from ..transport.messages import Message
from .check import Check, Host
from .digests import Leaves
from .replicas import Replicas
from .state import Entry, Hashed, State

_STAGES = (phases.GRADIENT, phases.PARAMETER, phases.OPTIMIZER_STATE)
"""What rests between the backward and the update, so that it can be hashed a second time."""


class Stop(Check):
    """Ranks agree before every update; it must be the last of the checks, and waits for the device.

    Without a group of the ranks it is off (`rank.Rank`): a rank that stopped alone would let the others wait.

    Args:
        rank: of which this is a check.
        replicas: has hashed what ranks must have equal; None: only verdicts of the monitor stop training.
    """

    name = "stop"
    together = True

    def __init__(self, rank: Host, replicas: Replicas | None = None, **settings: Any) -> None:
        super().__init__(rank, **settings)
        self._verdict, self._ended = "", False
        self._asked = 0
        self._replicas = replicas
        if replicas is not None:
            replicas.kept = []

    def order(self, message: Message) -> None:
        """The monitor has a verdict."""
        self._verdict = str(message.body.get("sentence", "the guard has a verdict"))

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Ask whether any rank has a reason to end; once they have ended, a program that goes on is not stopped again.

        Raises:
            GuardVerdict: any rank knows of a verdict, or ranks that must be equal are not; in all ranks.
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
        verdict, *found = self.rank.group.highest([bool(self._verdict), *numbers, *(~number for number in numbers)])
        agree = [high == ~low for high, low in zip(found[: len(numbers)], found[len(numbers) :], strict=True)]
        self.rank.coverage.count(self.name, steps=1)
        if verdict:
            self._ended = True
            raise GuardVerdict(self._verdict or f"step {step}: another rank was told of a verdict of the guard")
        for stage, which, root in zip(_STAGES, agree[::2], agree[1::2], strict=True):
            if not which:
                self.rank.coverage.unseen(self.name, f"{stage}: ranks do not have the same tensors of it")
            elif not root:
                self._differ(step, stage, parts)

    def _differ(self, step: int, stage: str, parts: Sequence[Hashed]) -> None:
        """Roots differ: hash a second time, so that no message and no error of the hash ends training."""
        entries = [entry for part in parts for entry in part.entries if self._is_of_all(entry)]
        now = State.of(self.rank).hash(self.name, [entry for entry in entries if entry.stage == stage])
        leaves = self._leaves(now)[stage]
        rows = dict(enumerate(self.rank.group.gather_padded(leaves.numbers())))
        place = first_difference(rows, [list(rows)])
        if place is None:
            self.rank.coverage.unseen(self.name, "ranks that differed, and agree when they hash again")
            return
        apart = groups({rank: row[place] if place < len(row) else None for rank, row in rows.items()})
        few = minority(apart)
        others = [rank for rank in rows if rank not in few]
        who = f"{ranks(few)} and {ranks(others)}" if few else " and ".join(map(ranks, apart))
        names = leaves.labels.names
        what = named(stage, names[place]) if place < len(names) else stage
        self._ended = True
        raise GuardVerdict(f"step {step}: {who} must be equal, and differ in {what}")

    def _is_of_all(self, entry: Entry) -> bool:
        return len(entry.ranks) == self.rank.world > 1

    def _leaves(self, parts: Iterable[Hashed]) -> dict[str, Leaves]:
        """Leaves of what all ranks must have, by stage; waits for the device."""
        rows: dict[str, list[tuple[str, str, bytes]]] = {stage: [] for stage in _STAGES}
        for part in parts:
            lanes = part.lanes.cpu().numpy().tobytes()
            for row, (entry, described) in enumerate(zip(part.entries, part.descriptions, strict=True)):
                if entry.stage in rows and self._is_of_all(entry):
                    rows[entry.stage].append((entry.name, described, lanes[16 * row : 16 * row + 16]))
        return {stage: Leaves.of(found) for stage, found in rows.items()}
