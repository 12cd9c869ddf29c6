"""Run Python programs in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

_OURS = (
    "DASH_INDUCTOR",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_LOGS",
    "TORCHINDUCTOR_FX_GRAPH_CACHE",
    "TORCHINDUCTOR_AUTOGRAD_CACHE",
)


def run_python(
    code: str, *args: str, python: str | Path = sys.executable, path: Path | None = None, **env: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run `code` from a directory outside the source tree; it must succeed.

    Args:
        code: the program, indented as is convenient.
        args: its command line.
        python: the interpreter.
        path: a directory whose packages win over installed ones.
        env: variables on top of this process's environment, without those that steer dash_inductor or the caches.
    """
    result = run_python_unchecked(code, *args, python=python, path=path, **env)
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


def run_python_unchecked(
    code: str, *args: str, python: str | Path = sys.executable, path: Path | None = None, **env: str | Path
) -> subprocess.CompletedProcess[str]:
    """As `run_python`, for programs that may fail."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    environment.update({name: str(value) for name, value in env.items()})
    return subprocess.run(
        [str(python), "-c", textwrap.dedent(code), *args],
        env=environment,
        cwd=os.path.expanduser("~"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
