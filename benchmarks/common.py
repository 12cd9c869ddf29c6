"""Shared parts of the benchmarks: conditions, timing, the watchdog, results files."""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dash_inductor.version import __version__

from .timing import take_turns

RESULTS = Path(__file__).parent / "results"


class NotRun(RuntimeError):
    """Raised by a contender that cannot run a shape."""


def reason(error: Exception) -> str:
    """Returns the type of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:200]}"


def watchdog(seconds: float) -> None:
    """Ends the process with all stacks if it still runs after `seconds`; a further call restarts the clock."""
    faulthandler.cancel_dump_traceback_later()
    faulthandler.dump_traceback_later(seconds, exit=True)


def conditions() -> dict[str, Any]:
    """Returns versions, GPU and commit, for the head of a results file; BENCHMARK_COMMIT overrides the commit of
    git.
    """
    commit = os.environ.get("BENCHMARK_COMMIT", "")
    if not commit:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        commit = git.stdout.strip() if git.returncode == 0 else "unknown"
    import triton

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "dash_inductor": __version__,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts | {"commit": commit}


def time_ms(*runs: Callable[[], object], repeats: int = 20, warmup: int = 3) -> list[float]:
    """Returns median GPU times in ms of one call of each contender; the calls alternate (`benchmarks.timing`)."""
    timings = take_turns(dict(enumerate(runs)), "cuda", repeats=repeats, warmup=warmup)
    return [timings[i].median for i in range(len(runs))]


def renamed(function: types.FunctionType, name: str) -> types.FunctionType:
    """Copies a function with its own code object, since Dynamo compiles per code object."""
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def write(name: str, payload: dict[str, Any]) -> Path:
    """Writes benchmarks/results/<name>.json and returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")
    return path


def table(rows: list[dict[str, Any]]) -> None:
    """Prints rows with equal keys as an aligned table."""
    if not rows:
        return
    cells = [list(rows[0])] + [[_cell(v) for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        print("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip(), flush=True)


def _cell(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 10
        else f"{value:.1f}"
        if isinstance(value, float)
        else str(value)
    )
