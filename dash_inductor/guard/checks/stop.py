"""Ends training in all ranks before parameters change, when there is a verdict: ``on_verdict="raise"``."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import GuardVerdict
from ..check import Check, Host
from ..messages import Message


class Stop(Check):
    """The monitor names a step that no rank has reached; it must be the last of the checks."""

    name = "stop"

    def __init__(self, rank: Host, **settings: Any) -> None:
        super().__init__(rank, **settings)
        self._step, self._verdict = 0, ""

    def order(self, message: Message) -> None:
        """The monitor has a verdict."""
        self._step, self._verdict = message.step, str(message.body.get("sentence", "the guard has a verdict"))

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """
        Raises:
            GuardVerdict: the monitor has a verdict, in all ranks.
        """
        if self._verdict and self.rank.step >= self._step:
            verdict, self._verdict = self._verdict, ""
            raise GuardVerdict(verdict)
