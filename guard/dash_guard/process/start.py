"""Starts the guard in a program that does not call it, if the environment has DASH_GUARD=folder."""

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
    """Watch this process, with settings from the environment, from its first process group, module or optimizer on."""
    from .guard import FromEnvironment

    try:
        numbers, on_confirmed = settings.parse(os.environ.get(settings.VARIABLE, ""))
    except ArgumentError as error:  # an import of torch must not fail because of it
        log.warning("the guard is off: %s", error)
        return
    guard = FromEnvironment(Path(os.environ[FOLDER]).absolute(), numbers, on_confirmed)
    guard.wait()
    atexit.register(guard.close)
