"""What `import torch` runs of dash_guard: start what the environment asks for, the guard or a recording.

torch loads every entry point of the group `torch.backends` at the end of its own import, and any exception there makes
`import torch` fail for the whole environment.  So this module imports only the standard library unless one of its
variables is set, and whatever fails then becomes one warning.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings

STARTS = {"DASH_GUARD_RECORD": "dash_guard.recorder.start", "DASH_GUARD": "dash_guard.process.start"}
"""The modules that start what each variable asks for, by a function `from_environment`."""

_armed = False


def autoload() -> None:
    """Start once what the environment asks for, when torch has been imported.

    Never raises: what is broken becomes one warning.
    """
    global _armed
    if _armed:
        return
    _armed = True
    for variable, module in STARTS.items():
        if os.environ.get(variable):
            try:
                hooks = importlib.import_module("_dash_inductor_autoload")
                hooks.after_import("torch", functools.partial(_start, variable, module))
            except (Exception, SystemExit) as error:
                _warn(variable, error)


def _start(variable: str, module: str) -> None:
    if not os.environ.get(variable):  # deleted since, as in the process of a monitor
        return
    try:
        importlib.import_module(module).from_environment()
    except (Exception, SystemExit) as error:
        _warn(variable, error)


def _warn(variable: str, error: BaseException) -> None:
    text = f"dash_guard is off, although {variable} is set. {type(error).__name__}: {error}"
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except Warning:  # warnings are errors in this process, but this one must not break an import
        print(f"warning: {text}", file=sys.stderr)
