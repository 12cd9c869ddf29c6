"""Sends what a rank runs (versions, settings and environment variables) once, before its first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dash_inductor.upstream.eager import not_compiled

from ..observation import environment
from ..upstream.collectives import device_uuid
from .check import Check, Host


class Facts(Check):
    """A check that sends `environment.facts` once, at the first event on the training thread.

    On this thread, the current GPU is that of the rank.
    """

    name = "facts"

    def __init__(self, rank: Host, **settings: Any) -> None:
        super().__init__(rank, **settings)
        self._every, self._sent = int(settings.get("every", 1)), False

    def module_begins(self, module: nn.Module) -> None:
        """Send the facts about the environment, unless they were sent before."""
        self._send_once()

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the facts about the environment, unless they were sent before; for programs that run no module."""
        self._send_once()

    @not_compiled
    def _send_once(self) -> None:
        if not self._sent:
            self._sent = True
            facts = environment.facts(self.rank.number, self.rank.world, self._every)
            self.send(self.rank.step, facts=facts, device=device_uuid())
            self.rank.coverage.count(self.name, ranks=1)
