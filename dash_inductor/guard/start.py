"""Starts the guard in a program that knows nothing of it: DASH_INDUCTOR_GUARD=folder."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

from .connect import FOLDER

SETTINGS = {"every": 1, "rest": 1, "roll_call": 100, "replay": 0, "doors": 1}
"""Settings without a change: the defaults of `guard`."""


def from_environment() -> None:
    """Watch this process from its first process group, module or optimizer to its end."""
    from .guard import FromEnvironment

    guard = FromEnvironment(Path(os.environ[FOLDER]).absolute(), SETTINGS)
    guard.wait()
    atexit.register(guard.close)
