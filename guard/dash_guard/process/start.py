"""Starts the guard in a program that knows nothing of it: DASH_GUARD=folder."""

from __future__ import annotations

import atexit
import logging
import os
from pathlib import Path

from dash_inductor.errors import ArgumentError

from ..transport.connect import FOLDER
from . import settings

log = logging.getLogger("dash_guard")


def from_environment() -> None:
    """Watch this process from its first process group, module or optimizer to its end."""
    from .guard import FromEnvironment

    try:
        numbers, on_verdict = settings.parse(os.environ.get(settings.VARIABLE, ""))
    except ArgumentError as error:  # an import of torch must not end by it
        log.warning("the guard is off: %s", error)
        return
    guard = FromEnvironment(Path(os.environ[FOLDER]).absolute(), numbers, on_verdict)
    guard.wait()
    atexit.register(guard.close)
