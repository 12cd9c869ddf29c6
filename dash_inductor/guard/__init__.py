"""The guard names the rank of a training run that computes wrongly, hangs, has died or lags, while the run goes on.

In the process of every rank, `rank.Rank` gets the events of training and shows them to its checks (`check.Check`).
A check computes what is to be compared, and sends it (`messages.Message`, `channel.Channel`) to one monitor
(`monitor.Monitor`), whose judges (`judge.Judge`) find out what it means (`findings.Finding`).  Judges are pure: they
know messages and the time, and touch no process, clock or network.  Nothing of the guard runs in a collective of the
training, changes a bit of it, or ends it; what a check could not see goes into `coverage.Coverage`.

`dash_inductor.guard` is the function `guard.guard` too: this package can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from .guard import guard

        return guard(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
