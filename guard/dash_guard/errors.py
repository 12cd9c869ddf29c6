"""The errors of dash_guard; all of them derive from `dash_inductor.errors.DashError`."""

from __future__ import annotations

import os

from dash_inductor.errors import DashError
from dash_inductor.untrusted import printable


class RecordingError(DashError, RuntimeError):
    """Raised if a file of a recording or of a guard cannot be written, or if this version cannot read it.

    Args:
        path: the file.
        found: what is wrong with it.
        allowed: what is expected, or what to do.
    """

    def __init__(self, path: str | os.PathLike[str], found: str, allowed: str) -> None:
        self.path, self.found, self.allowed = os.fspath(path), found, allowed
        super().__init__(printable(f"{self.path}: {found}; expected {allowed}"))


class FaultConfirmedError(DashError, RuntimeError):
    """Raised on every rank before an optimizer steps, if a fault is confirmed and ``on_confirmed="raise"``."""
