"""Run Python programs in fresh processes, and work that the processes of a test run share."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

HANGS = 1800
"""Seconds after which a process is taken to hang, however slow a machine is that does something else too."""
LARGE_HEAP = 50_000, 20, 100
"""Thresholds of Python's garbage collector, which takes a quarter of the time of imports and compiles otherwise."""
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
    return subprocess.run(
        [str(python), "-c", f"import gc; gc.set_threshold{LARGE_HEAP}\n{textwrap.dedent(code)}", *args],
        env=environment_of(path, **env),
        cwd=os.path.expanduser("~"),
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )


def environment_of(path: Path | None = None, **env: str | Path) -> dict[str, str]:
    """The variables of a process that `run_python` starts."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH"))))
    return {**environment, **{name: str(value) for name, value in env.items()}}


def run_together(commands: Mapping[str, Sequence[str]], *, seconds: float, folder: Path) -> dict[str, str]:
    """The outputs of programs that run at the same time and may wait for one another, by name.

    The first that fails ends the others, so that it is named, and not those that wait for it; so does the end of the
    time.  The test then fails with what all of them had said.

    Args:
        commands: by name, with the program first.
        seconds: that they may take.
        folder: where they run.
    """
    with ExitStack() as stack:
        files = {name: stack.enter_context(tempfile.TemporaryFile("w+")) for name in commands}
        running = {
            name: subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=files[name], text=True)
            for name, command in commands.items()
        }
        deadline = time.monotonic() + seconds
        try:
            statuses = [process.poll() for process in running.values()]
            while None in statuses and not any(statuses) and time.monotonic() < deadline:
                time.sleep(0.05)
                statuses = [process.poll() for process in running.values()]
        finally:
            for process in running.values():
                process.kill()
        printed = {name: process.communicate()[0] for name, process in running.items()}
        ends = []
        for (name, file), status in zip(files.items(), statuses, strict=True):
            file.seek(0)
            end = f"was ended, after {seconds:g} s at the latest" if status is None else f"exit status {status}"
            ends.append(f"{name}: {end}\n{printed[name]}\n{file.read()[-2000:]}")
        if any(status != 0 for status in statuses):
            raise AssertionError("\n".join(ends))
        return printed


def once_in_this_run(name: str, work: Callable[[], object]) -> None:
    """Do something whose result lies in Triton's cache once for all processes of a test run; the others wait for it."""
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / f"{name}.done"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            work()
            done.touch()
