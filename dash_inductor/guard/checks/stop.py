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

    Attributes:
        root: gives a hash, 64 bits with a sign, of what all ranks of the job must have equal in this step; None: only
            the monitor's verdicts stop training.
    """

    name = "stop"

    def __init__(self, rank: Host, **settings: Any) -> None:
        super().__init__(rank, **settings)
        self.root: Callable[[], int] | None = None
        self._verdict, self._from = "", 0
        self._asked = 0

    def order(self, message: Message) -> None:
        """The monitor has a verdict, which is to end training from a step on."""
        self._verdict, self._from = str(message.body.get("sentence", "the guard has a verdict")), message.step

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """
        Raises:
            GuardVerdict: any rank knows of a verdict, or ranks that must be equal are not; in all ranks.
        """
        step = self.rank.step
        if self._asked == step or in_backward():
            return
        self._asked = step
        root = 0 if self.root is None else self.root()
        told = bool(self._verdict) and step >= self._from
        verdict, highest, lowest = self.rank.group.highest([told, root, ~root])
        if verdict:
            sentence, self._verdict = self._verdict, ""
            raise GuardVerdict(sentence or f"step {step}: another rank was told of a verdict of the guard")
        if highest != ~lowest:
            raise GuardVerdict(f"step {step}: ranks that must be equal differ; the guard's findings say which")
