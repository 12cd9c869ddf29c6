"""What `import torch` runs of dash_guard: start what the environment asks for, the guard or a recording.

torch loads every entry point of the group `torch.backends` at the end of its own import, and any exception there makes
`import torch` fail for the whole environment.  So this module stands by itself, standard library only, and imports
dash_guard only if one of its variables is set.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings

STARTS = {"DASH_GUARD_RECORD": "dash_guard.recorder.start", "DASH_GUARD": "dash_guard.process.start"}
"""The modules that start what each variable asks for, by a function `from_environment`."""

_started = False


def autoload() -> None:
    """Start once what the environment asks for.  Never raises: what is broken becomes one warning."""
    global _started
    if _started:
        return
    _started = True
    for variable, module in STARTS.items():
        if os.environ.get(variable):
            try:
                importlib.import_module(module).from_environment()
            except (Exception, SystemExit) as error:
                _warn(f"dash_guard is off, although {variable} is set. {type(error).__name__}: {error}")


def _warn(text: str) -> None:
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except Warning:  # warnings are errors in this process, but this one must not break an import
        print(f"warning: {text}", file=sys.stderr)
