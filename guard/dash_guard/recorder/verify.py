"""Runs a script twice in fresh processes, and compares what the two runs computed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dash_inductor.errors import DashError

from ..recordings.compare import Comparison, compare
from .start import VARIABLE


class ScriptError(DashError, RuntimeError):
    """Raised if a script has ended with an error, or has done nothing that can be recorded."""


def verify(arguments: Sequence[str], folder: Path, say: Callable[[str], None] = lambda text: None) -> Comparison:
    """Run ``python *arguments`` twice and compare the two runs; what they print goes to standard error.

    Every process that the script starts records into a file of its rank.

    Args:
        arguments: the arguments of the Python interpreter: a script, or ``-m`` and a module, then its own arguments.
        folder: gets the recordings, in the folders ``a`` and ``b``.
        say: is called with a line about each run.

    Raises:
        KeyboardInterrupt: this process or a run was interrupted.
        ScriptError: a run failed, or left no recording.
        RecordingError: the folder has recordings already, or one cannot be read.
    """
    for number, name in enumerate(("a", "b"), 1):
        say(f"run {number} of 2: {' '.join(arguments)}")
        _run(arguments, folder / name)
    return compare(folder / "a", folder / "b")


def _run(arguments: Sequence[str], folder: Path) -> None:
    if any(folder.glob("rank*.dash")):
        raise ScriptError(f"{folder} has a recording already: name another folder, or remove it")
    environment = {**os.environ, VARIABLE: str(folder.resolve())}
    status = subprocess.run([sys.executable, *arguments], env=environment, stdout=sys.stderr, check=False).returncode
    if status in (-signal.SIGINT, 128 + signal.SIGINT):  # of a script, and of a shell or a launcher
        raise KeyboardInterrupt
    if status:
        raise ScriptError(f"{' '.join(arguments)} ended with exit status {status}")
    if not any(folder.glob("rank*.dash")):
        hint = "it called no module and no optimizer of PyTorch"
        if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
            hint = "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set, and it does not import dash_guard"
        raise ScriptError(f"{' '.join(arguments)} left no recording: {hint}")
