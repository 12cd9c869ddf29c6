"""Ends training in all ranks alike, before parameters change, when there is a verdict: ``on_verdict="raise"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import GuardVerdict
from ...upstream.eager import in_backward
from ..check import Check, Host
from ..messages import Message


class Stop(Check):
    """Ranks agree on three numbers before every update; it must be the last of the checks.

    Without a group of the ranks it is off (`rank.Rank`): a rank that stopped alone would let the others wait.

    Attributes:
        root: gives a hash, 64 bits with a sign, of what all ranks of the job must have equal in this step; None: only
            the monitor's verdicts stop training.
    """

    name = "stop"
    together = True

    def __init__(self, rank: Host, **settings: Any) -> None:
        super().__init__(rank, **settings)
        self.root: Callable[[], int] | None = None
        self._verdict, self._ended = "", False
        self._asked = 0

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
        root = 0 if self.root is None else self.root()
        verdict, highest, lowest = self.rank.group.highest([bool(self._verdict), root, ~root])
        self.rank.coverage.count(self.name, steps=1)
        if verdict:
            self._ended = True
            raise GuardVerdict(self._verdict or f"step {step}: another rank was told of a verdict of the guard")
        if highest != ~lowest:
            self._ended = True
            raise GuardVerdict(f"step {step}: ranks that must be equal differ; the guard's findings say which")
