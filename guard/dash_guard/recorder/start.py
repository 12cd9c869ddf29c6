"""Starts a recording in a program that does not call `record`, if the environment has DASH_GUARD_RECORD=folder."""

from __future__ import annotations

import atexit
import os

VARIABLE = "DASH_GUARD_RECORD"


def from_environment() -> None:
    """Record this process from now to its end; the file is created when there is something to record."""
    from .recorder import record

    recorder = record(os.environ[VARIABLE])
    recorder.__enter__()
    atexit.register(recorder.close)
