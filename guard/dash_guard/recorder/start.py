"""Starts a recording in a program that does not call `record`, if the environment has DASH_GUARD_RECORD=folder.

With DASH_GUARD_VALUES=1 it has the values of gradients and parameters, too.  With DASH_GUARD_STOP_AFTER=steps the
program ends with exit status 0 after so many training steps.
"""

from __future__ import annotations

import atexit
import os

VARIABLE = "DASH_GUARD_RECORD"
VALUES = "DASH_GUARD_VALUES"
STOP_AFTER = "DASH_GUARD_STOP_AFTER"


def from_environment() -> None:
    """Record this process from now to its end; the file is created when there is something to record."""
    from dash_inductor.errors import ArgumentError
    from dash_inductor.observers.scripts import stopping_after

    from .recorder import record

    steps = os.environ.get(STOP_AFTER) or "0"
    if not steps.isdecimal():
        raise ArgumentError(STOP_AFTER, steps, "a whole number of training steps")
    recorder = record(os.environ[VARIABLE], values=os.environ.get(VALUES, "0") != "0")
    recorder.__enter__()
    atexit.register(recorder.close)
    stopping = stopping_after(int(steps))
    stopping.__enter__()
    atexit.register(stopping.__exit__, None, None, None)
