"""Sends what a rank runs (versions, settings and environment variables) before its first step.

Settings that a program changes later are sent again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dash_inductor.upstream.eager import not_compiled

from ..observation import environment
from ..upstream.collectives import device_uuid
from .check import Check, Host


class Facts(Check):
    """A check that sends `environment.facts` at the first event on the training thread, and when settings change.

    Hashes of strings are sent beside them: unlike facts, they differ between ranks unless PYTHONHASHSEED is set.

    On this thread, the current GPU is that of the rank.
    """

    name = "facts"

    def __init__(self, rank: Host, **settings: Any) -> None:
        super().__init__(rank, **settings)
        self._every, self._sent = int(settings.get("every", 1)), dict[str, Any]()

    def module_begins(self, module: nn.Module) -> None:
        """Send the facts if they were not sent before."""
        if not self._sent:
            self._send_new()

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the facts if they were not sent before, or if a setting has changed since."""
        self._send_new()

    @not_compiled
    def _send_new(self) -> None:
        now = environment.changeable()
        if now != self._sent:
            self.rank.coverage.count(self.name, ranks=int(not self._sent))
            self._sent = now
            facts = environment.facts(self.rank.number, self.rank.world, self._every)
            self.send(self.rank.step, facts=facts, device=device_uuid(), string_hashes=environment.string_hashes())
